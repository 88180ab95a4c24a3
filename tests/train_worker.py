"""Optimizer steps of one stage, by one process or by several: `train_worker.py FOLDER`.

FOLDER/job.json holds the settings; rank 0 writes FOLDER/done.json and FOLDER/weights.safetensors.
"""

from __future__ import annotations

import json
import os
import signal
import socket
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


def steps(
    folder: Path,
    settings: dict[str, Any],
    world: int,
    environment: dict[str, str] | None = None,
    *,
    nodes: int = 1,
) -> Done:
    """Runs five steps, or settings["num_steps"], in `world` fresh processes."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(settings))
    launch(world, [__file__, str(folder)], nodes=nodes, environment=environment)
    done = json.loads((folder / "done.json").read_text())
    return Done(**done, weights=load_file(folder / "weights.safetensors"))


def launch(
    world: int,
    command: list[str],
    *,
    check: bool = True,
    nodes: int = 1,
    environment: dict[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """`python COMMAND` as `world` ranks, started as launchers start them on `nodes` nodes; waits
    for all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ranks = []
    for rank in range(world):
        node, local = divmod(rank, world // nodes)
        place = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "WORLD_SIZE": world}
        place |= {"LOCAL_WORLD_SIZE": world // nodes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {k: str(v) for k, v in place.items()} if world > 1 else {}
        ranks.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=env | own | (environment or {}),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    for rank in ranks:
        out, error = rank.communicate(timeout=400)
        done.append(subprocess.CompletedProcess(command, rank.returncode, out, error))
    assert not check or not any(d.returncode for d in done), done[0].stderr[-3000:]
    return done


def main(folder: Path) -> None:
    from train.config import check
    from train.distributed import whole_weights
    from train.loop import Data, Fit
    from train.run import Run
    from train.states import LiveStates

    job = json.loads((folder / "job.json").read_text())
    if job.pop("own_folders", False):
        os.chdir(folder / f"rank{os.environ['RANK']}")
    num_steps = job.pop("num_steps", 5)
    num_steps = job.pop("num_steps", 5)
    if job["target"].get("dtype") == "float64":
        torch.set_default_dtype(torch.float64)  # the trainee's weights too
    config = check(OmegaConf.create(job))  # pyright: ignore[reportArgumentType]
    run = Run(config)
    stage = run.build(config.stages[0])
    data = Data(run.train, run.held_out, LiveStates(run.target, run.layer_ids()))
    fit = Fit(stage, data, run.target, config, run.accelerator, run.folder)
    parts = [part for step in range(fit.num_steps) for part in fit.parts(step)]
    seen = [sample.id for part in parts if not part.silent for sample in part.samples]
    (folder / f"seen-{fit.rank}.json").write_text(json.dumps(seen))
    done = [fit.step(i) for i in range(num_steps)]
    fit.evaluate(0)
    weights = whole_weights(run.accelerator, stage.model)
    if run.accelerator.is_main_process:
        tau = json.loads((run.folder / "metrics.jsonl").read_text())["tau"]
        said = {"losses": [d.loss for d in done], "norms": [d.grad_norm for d in done], "tau": tau}
        (folder / "done.json").write_text(json.dumps(said))
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "weights.safetensors")
    run.accelerator.end_training()


def whole_run(settings: Path, sigterm_at: str | None) -> None:
    """A whole run; rank 1 sends itself SIGTERM in the step given, as in "stage 3"."""
    from train import run as program
    from train.config import check
    from train.loop import Fit
    from train.signals import Interrupted
    from train.work import Step

    original = Fit.step

    def interrupted(self: Fit, step: int) -> Step:
        if f"{self.stage.config.name} {step}" == sigterm_at and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    Fit.step = interrupted
    try:
        program.train(check(OmegaConf.create(json.loads(settings.read_text()))))  # pyright: ignore
    except Interrupted:
        assert sigterm_at is not None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        whole_run(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        main(Path(sys.argv[1]))
