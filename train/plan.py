"""`run=plan`: what a run would take, said before anything starts."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dlite.files import write_atomically
from dlite.model.config import DraftConfig
from dlite.target import TargetModel
from train.batches import num_steps_per_epoch, step_samples
from train.config import StageConfig, TrainConfig
from train.data import anchors
from train.estimate import Load, Memory, TargetSizes, flops, memory, parameters
from train.loop import Data, Fit
from train.packing import deal
from train.stages import draft_config
from train.states import LiveStates

if TYPE_CHECKING:
    from train.run import Run

STEPS_LOOKED_AT = 200  # optimizer steps in which the largest micro-batch is sought


@dataclass(slots=True)
class StagePlan:
    """`memory` in bytes of one rank; `steps` are optimizer steps."""

    stage: str
    steps: int
    trainable_parameters: int
    teraflops_per_step: float
    seconds_per_step: float
    hours: float
    peak_memory_bytes: int
    memory: dict[str, int]


@dataclass(slots=True)
class Plan:
    stages: list[StagePlan]
    samples: int
    tokens: int
    hours: float
    gpu_hours: float
    dollars: float
    states_bytes: int
    peak_memory_bytes: int
    disk_bytes: int
    from_weights: bool  # two steps were timed; else seconds follow from FLOPs and plan.mfu


def peak_bytes() -> int:
    """The process's peak resident size, or the GPU's peak of allocated memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Planner:
    """Plans every stage from shapes; `load` is the largest micro-batch of a rank."""

    def __init__(
        self, config: TrainConfig, target: TargetModel, draft: DraftConfig, load: Load, ranks: int
    ) -> None:
        self.config, self.draft, self.load, self.ranks = config, draft, load, ranks
        self.samples_in_load = 1
        self.target = TargetSizes.of(target)
        drafts = [self.draft_of(stage) for stage in config.stages]
        self.num_state_layers = len(
            {k for d in drafts for k in d.state_layer_ids} | {target.num_layers - 1}
        )

    def draft_of(self, stage: StageConfig) -> DraftConfig:
        return replace(self.draft, context=stage.context)  # type: ignore[arg-type]

    def teacher_of(self, stage: StageConfig) -> DraftConfig | None:
        named = [s for s in self.config.stages if s.name == stage.teacher]
        return self.draft_of(named[0]) if named else None

    def memory(self, stage: StageConfig) -> Memory:
        return memory(
            self.draft_of(stage),
            self.target,
            self.load,
            num_state_layers=self.num_state_layers,
            teacher=self.teacher_of(stage),
            bf16=self.config.mixed_precision == "bf16",
            checkpointing=self.config.activation_checkpointing,
        )

    def flops(self, stage: StageConfig) -> float:
        """Of one optimizer step over all ranks, as if all micro-batches were the largest."""
        wants_target = bool(stage.loss.tv or stage.loss.tau)
        teacher = self.teacher_of(stage)
        one = flops(
            self.draft_of(stage),
            self.target,
            self.load,
            teacher=teacher,
            target_logits=wants_target,
        )
        return one * self.micro_batches

    @property
    def micro_batches(self) -> float:
        """In an optimizer step, over all ranks."""
        optim = self.config.optim
        return max(1.0, optim.batch_size / self.samples_in_load)

    def stage(self, stage: StageConfig, num_samples: int, seconds: float | None) -> StagePlan:
        steps = stage.epochs * num_steps_per_epoch(num_samples, self.config.optim.batch_size)
        steps = min(steps, stage.max_steps or steps)
        work, plan, needs = self.flops(stage), self.config.plan, self.memory(stage)
        if seconds is None:
            seconds = work / (plan.gpu_teraflops * 1e12 * plan.mfu * self.ranks)
        return StagePlan(
            stage.name,
            steps,
            parameters(self.draft_of(stage)),
            work / 1e12,
            seconds,
            seconds * steps / 3600,
            needs.peak,
            asdict(needs),
        )


def largest_load(run: Run) -> tuple[Load, int]:
    """The micro-batch with the most anchors in the first steps of a stage, and its samples."""
    config, optim = run.config, run.config.optim
    world, loads = run.accelerator.num_processes, []
    per_epoch = num_steps_per_epoch(len(run.train), optim.batch_size)
    for step in range(min(STEPS_LOOKED_AT, per_epoch)):
        samples, epoch = step_samples(run.train, step, optim.batch_size, config.seed)
        shares = deal(samples, world, size=optim.micro_batch_size, tokens=optim.micro_batch_tokens)
        for part in (part for share in shares for part in share if part):
            lengths = [len(s.input_ids) for s in part]
            drawn = sum(len(anchors(s, config.seed, epoch, optim.anchors_per_sample)) for s in part)
            loads.append((Load(sum(lengths), drawn, max(lengths)), len(part)))
    return max(loads, key=lambda found: (found[0].anchors, found[0].tokens))


def measured_plan(run: Run) -> Plan:
    """Times two real steps of every stage (a teacher or warm start is replaced by random weights:
    the cost is the same) on live states."""
    num_samples = len(run.train) + len(run.held_out)
    load, in_load = largest_load(run)
    planner = Planner(run.config, run.target, run.draft, load, run.accelerator.num_processes)
    planner.samples_in_load = in_load
    data = Data(run.train, [], LiveStates(run.target, run.layer_ids()))
    stages = []
    for config in run.config.stages:
        stage = run.build(config, random=True)
        run.accelerator.free_memory()
        fit = Fit(stage, data, run.target, run.config, run.accelerator, run.folder)
        fit.step(0)
        began = time.perf_counter()
        fit.step(1)
        stages.append(planner.stage(config, len(run.train), time.perf_counter() - began))
    tokens = sum(len(s.input_ids) for part in (run.train, run.held_out) for s in part)
    in_memory = run.config.data.states == "memory"
    states = tokens * len(run.layer_ids()) * run.target.hidden_size * 4 if in_memory else 0
    return _sum(planner, stages, num_samples, tokens, states, from_weights=True)


def outlined_plan(config: TrainConfig) -> Plan:
    """From the target's config alone: a run of `plan.samples` samples on `plan.gpus` GPUs."""
    target = TargetModel.outline(config.target.name, dtype=config.target.dtype)
    plan, optim = config.plan, config.optim
    load = Load(
        plan.tokens_per_sample,
        min(optim.anchors_per_sample, plan.tokens_per_sample),
        plan.tokens_per_sample,
    )
    size = config.model.draft_vocab_size
    model = replace(config.model, draft_vocab_size=max(0, size))
    planner = Planner(config, target, draft_config(target, model, []), load, plan.gpus)
    stages = [planner.stage(stage, plan.samples, None) for stage in config.stages]
    tokens = plan.samples * plan.tokens_per_sample
    return _sum(planner, stages, plan.samples, tokens, 0, from_weights=False)


def _sum(
    planner: Planner,
    stages: list[StagePlan],
    samples: int,
    tokens: int,
    states: int,
    *,
    from_weights: bool,
) -> Plan:
    hours = sum(s.hours for s in stages)
    # A state holds float32 weights and two moments; a finished stage its weights, twice (best).
    kept = planner.config.keep_states + 1
    disk = sum(s.trainable_parameters * (4 + 4) for s in stages)
    disk += max(s.trainable_parameters for s in stages) * 12 * kept
    gpu_hours = hours * planner.ranks
    return Plan(
        stages,
        samples,
        tokens,
        hours,
        gpu_hours,
        gpu_hours * planner.config.plan.dollars_per_gpu_hour,
        states,
        max(s.peak_memory_bytes for s in stages) + states,
        disk,
        from_weights,
    )


def print_plan(plan: Plan, config: TrainConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "plan.json", json.dumps(asdict(plan), indent=2))
    print(f"{plan.samples:,} samples, {plan.tokens:,} tokens")
    for s in plan.stages:
        print(
            f"{s.stage}: {s.steps:,} steps, {s.trainable_parameters:,} trainable parameters, "
            f"{s.teraflops_per_step:.3g} TFLOP and {s.seconds_per_step:.3g} s a step, "
            f"{s.hours:.2f} h, peak {s.peak_memory_bytes / 1e9:.2f} GB a process"
        )
    print(
        f"in all {plan.hours:.1f} h"
        + ("" if plan.from_weights else f" at MFU {config.plan.mfu} (assumed)")
        + f", {plan.gpu_hours:.0f} process hours, peak memory {plan.peak_memory_bytes / 1e9:.2f} GB"
        + f" (states in memory {plan.states_bytes / 1e9:.2f} GB), "
        f"disk at most {plan.disk_bytes / 1e9:.2f} GB"
    )
    print(
        "less memory: optim.micro_batch_size=1 or optim.micro_batch_tokens, "
        "optim.anchors_per_sample, activation_checkpointing=true, mixed_precision=bf16, "
        "configs/accelerate/"
    )
    print(f"written to {folder / 'plan.json'}")
