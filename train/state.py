"""Saving and restoring a run: weights, optimizer and position, never half-written."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class Position:
    """`step` optimizer steps of stage `stage` are done."""

    stage: str
    step: int


def save_state(accelerator: Accelerator, folder: Path, position: Position, keep: int) -> None:
    """Write to a new folder, then move `latest`: a kill at any moment leaves a loadable state."""
    name = f"{position.stage}-{position.step:07d}"
    temporary = folder / f".{name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary), safe_serialization=True)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    (temporary / "position.json").write_text(json.dumps(asdict(position)))
    final = folder / name
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    write_atomically(folder / "latest", name)
    states = [p for p in folder.iterdir() if (p / "position.json").exists()]
    for old in sorted(states, key=lambda p: p.stat().st_mtime)[:-keep]:
        shutil.rmtree(old)


def latest(folder: Path) -> tuple[Path, Position] | None:
    """The newest complete state of a run, if there is one."""
    pointer = folder / "latest"
    if not pointer.exists():
        return None
    path = folder / pointer.read_text()
    if not (path / "position.json").exists():
        raise ValueError(
            f"{pointer} names {path.name}, which is not there; write another state's name into "
            "it, or delete it to start over"
        )
    return path, Position(**json.loads((path / "position.json").read_text()))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
