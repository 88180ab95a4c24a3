"""Saving and restoring a run: weights, optimizer and position, never half-written."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import is_initialized
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dlite.files import write_atomically


@dataclass(frozen=True, slots=True)
class Position:
    """`step` optimizer steps of stage `stage` are done."""

    stage: str
    step: int


@dataclass(slots=True)
class Trained:
    """What a state holds: a prepared module and its prepared optimizer."""

    accelerator: Accelerator
    module: nn.Module
    optimizer: AcceleratedOptimizer

    @property
    def _deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def launch(self) -> dict[str, str | int]:
        """What decides whether a state fits another launch."""
        return {
            "engine": "deepspeed" if self._deepspeed else "torch",
            "processes": self.accelerator.num_processes,
        }

    def write(self, folder: Path) -> None:
        if self._deepspeed:
            self.accelerator.save_state(str(folder))
        else:
            model, optimizer = get_state_dict(self.module, self.optimizer.optimizer)
            parts = {"model": model, "optimizer": optimizer}
            save(parts, checkpoint_id=folder, no_dist=not is_initialized())

    def read(self, folder: Path) -> None:
        """DDP, FSDP2 and single processes read each other's states, at any number of processes;
        DeepSpeed's are read by as many processes as wrote them. Raises ValueError."""
        wrote, reads = json.loads((folder / "launch.json").read_text()), self.launch()
        if wrote["engine"] != reads["engine"] or (self._deepspeed and wrote != reads):
            raise ValueError(
                f"{folder} was written by {wrote['processes']} processes with {wrote['engine']}, "
                f"this run has {reads['processes']} with {reads['engine']}; a DeepSpeed state is "
                "split by process: resume with as many, or train without DeepSpeed"
            )
        if self._deepspeed:
            self.accelerator.load_state(str(folder))
            return
        optimizer = self.optimizer.optimizer
        model_state, optimizer_state = get_state_dict(self.module, optimizer)
        parts = {"model": model_state, "optimizer": optimizer_state}
        load(parts, checkpoint_id=folder, no_dist=not is_initialized())
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )


def save_state(trained: Trained, folder: Path, position: Position, keep: int) -> None:
    """Write to a new folder, then move `latest`: a kill at any moment leaves a loadable state."""
    found, accelerator = latest(folder), trained.accelerator
    if found is not None and found[1] == position:
        return
    name = f"{position.stage}-{position.step:07d}"
    temporary = folder / f".{name}.tmp"
    accelerator.wait_for_everyone()  # nobody moves `latest` before all have read it
    if accelerator.is_main_process:
        for leftover in folder.glob(".*"):  # half-written or half-removed when a run was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    trained.write(temporary)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / "launch.json").write_text(json.dumps(trained.launch()))
        (temporary / "position.json").write_text(json.dumps(asdict(position)))
        _publish(temporary, folder / name, keep)
    accelerator.wait_for_everyone()


def _publish(temporary: Path, final: Path, keep: int) -> None:
    folder = final.parent
    shutil.rmtree(final, ignore_errors=True)  # of a run that died before it moved `latest`
    os.replace(temporary, final)
    write_atomically(folder / "latest", final.name)
    states = [p for p in folder.iterdir() if (p / "position.json").exists()]
    for old in sorted(states, key=lambda p: (p == final, p.stat().st_mtime))[:-keep]:
        doomed = old.with_name(f".{old.name}.old")
        os.replace(old, doomed)
        shutil.rmtree(doomed)


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
