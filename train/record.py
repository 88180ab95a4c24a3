"""What a run's folder says of it: its configuration and its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dlite.files import write_atomically
from train.config import StageConfig, TrainConfig
from train.state import Position


def keep_metrics_up_to(folder: Path, stages: list[StageConfig], position: Position | None) -> None:
    """Drop lines of steps that a resumed run does again; all of them when it starts over."""
    names = [s.name for s in stages]
    kept = []
    if position is not None:
        now = names.index(position.stage), position.step
        for line in read_metrics(folder):
            at = names.index(line["stage"]), line["step"]
            # A run evaluates where it resumes: the line that it wrote there before goes.
            if at < now or (at == now and "tau" not in line):
                kept.append(json.dumps(line) + "\n")
    write_atomically(folder / "metrics.jsonl", "".join(kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines logged so far; a last one that a kill tore is left out."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def as_json(config: TrainConfig) -> str:
    return json.dumps(OmegaConf.to_container(OmegaConf.structured(config)), sort_keys=True)


def check_same_run(folder: Path, config: TrainConfig, *, resuming: bool) -> None:
    """A resumed run must have the settings that it was begun with; say which differ."""
    file = folder / "config.yaml"
    now = OmegaConf.structured(config)
    if resuming and file.exists():
        before, ours = (OmegaConf.to_container(c) for c in (OmegaConf.load(file), now))
        assert isinstance(before, dict) and isinstance(ours, dict)
        free = {"run", "resume", "tracker", "log_every", "eval_every", "save_every", "keep_states"}
        differing = [str(k) for k in ours if k not in free and before.get(k) != ours[k]]
        if differing:
            raise ValueError(
                f"{folder} was begun with other settings of {', '.join(differing)}; "
                "use them again, or give another name= or resume=false"
            )
    write_atomically(file, OmegaConf.to_yaml(now))
