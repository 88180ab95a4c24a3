"""`run=plan`: what a run would take, said before anything starts."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from train.loop import Data, Fit, num_steps
from train.state import write_atomically
from train.states import LiveStates

if TYPE_CHECKING:
    from train.run import Run


@dataclass(slots=True)
class StagePlan:
    stage: str
    steps: int
    trainable_parameters: int
    weights_gradients_optimizer_bytes: int
    seconds_per_step: float
    hours: float


@dataclass(slots=True)
class Plan:
    stages: list[StagePlan]
    samples: int
    tokens: int
    states_bytes: int
    peak_memory_bytes: int
    disk_bytes: int


def peak_bytes() -> int:
    """The process's peak resident size, or the GPU's peak of allocated memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def make_plan(run: Run) -> Plan:
    """Times two real steps of every stage (a teacher or warm start is replaced by random weights:
    the cost is the same) on live states."""
    samples = [*run.train, *run.held_out]
    tokens = sum(len(s.input_ids) for s in samples)
    live = LiveStates(run.target, run.layer_ids())
    data = Data(run.train, [], live)
    plans, disk = [], 0
    for config in run.config.stages:
        stage = run.build(config, random=True)
        run.accelerator.free_memory()
        fit = Fit(stage, data, run.target, run.config, run.accelerator, run.folder)
        fit.step(0)
        began = time.perf_counter()
        fit.step(1)
        seconds = time.perf_counter() - began
        trainable = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        steps = num_steps(stage, data, run.config)
        plans.append(
            StagePlan(
                config.name, steps, trainable, trainable * 16, seconds, seconds * steps / 3600
            )
        )
        # A state holds float32 weights and two moments; a finished stage its weights.
        disk += trainable * (12 * (run.config.keep_states + 1) + 4)
    in_memory = run.config.data.states == "memory"
    states = tokens * len(run.layer_ids()) * run.target.hidden_size * 4 if in_memory else 0
    return Plan(plans, len(samples), tokens, states, peak_bytes() + states, disk)


def print_plan(run: Run) -> None:
    plan = make_plan(run)
    write_atomically(run.folder / "plan.json", json.dumps(asdict(plan), indent=2))
    print(f"{plan.samples:,} samples, {plan.tokens:,} tokens")
    for s in plan.stages:
        print(
            f"{s.stage}: {s.steps:,} steps, {s.trainable_parameters:,} trainable parameters, "
            f"{s.seconds_per_step:.2f} s a step, {s.hours:.2f} h"
        )
    print(
        f"peak memory {plan.peak_memory_bytes / 1e9:.2f} GB (two steps, and states in memory "
        f"{plan.states_bytes / 1e9:.2f} GB), disk at most {plan.disk_bytes / 1e9:.2f} GB"
    )
    print(f"written to {run.folder / 'plan.json'}")
