"""Optimizer steps of one stage, by one process or several: `torchrun ... train_worker.py FOLDER`.

FOLDER/job.json holds the settings; rank 0 writes FOLDER/done.json and FOLDER/weights.safetensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class Done:
    losses: list[float]
    norms: list[float]
    tau: float
    weights: dict[str, Tensor]


def steps(folder: Path, settings: dict[str, Any], world: int, **environment: str) -> Done:
    """Runs five steps in `world` fresh processes."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(settings))
    launch(world, [__file__, str(folder)], **environment)
    done = json.loads((folder / "done.json").read_text())
    return Done(**done, weights=load_file(folder / "weights.safetensors"))


def launch(
    world: int, command: list[str], *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python COMMAND` under torchrun on a free port, or alone."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    if world == 1:
        launcher, command = [], ["-m" if command[0] == "train.run" else command[0], *command[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    full = [sys.executable, *(["-m", *launcher] if launcher else []), *command]
    done = subprocess.run(
        full, env=env | environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def main(folder: Path) -> None:
    from train.config import check
    from train.distributed import whole_weights
    from train.loop import Data, Fit
    from train.run import Run
    from train.states import LiveStates

    job = json.loads((folder / "job.json").read_text())
    if job["target"].get("dtype") == "float64":
        torch.set_default_dtype(torch.float64)  # the trainee's weights too
    config = check(OmegaConf.create(job))  # pyright: ignore[reportArgumentType]
    run = Run(config)
    run.folder.mkdir(parents=True, exist_ok=True)
    stage = run.build(config.stages[0])
    data = Data(run.train, run.held_out, LiveStates(run.target, run.layer_ids()))
    fit = Fit(stage, data, run.target, config, run.accelerator, run.folder)
    done = [fit.step(i) for i in range(5)]
    fit.evaluate(0)
    weights = whole_weights(run.accelerator, stage.model)
    if run.accelerator.is_main_process:
        tau = json.loads((run.folder / "metrics.jsonl").read_text())["tau"]
        said = {"losses": [d.loss for d in done], "norms": [d.grad_norm for d in done], "tau": tau}
        (folder / "done.json").write_text(json.dumps(said))
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "weights.safetensors")
    run.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
