"""Times and peaks at true sizes: a training step, a draft round, a verification."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dlite.target import TargetModel
from eval.shapes import Rounds, Tables, build_model, build_rounds
from gpu_check.sizes import SIZES, Plan, random_target
from train.config import LossConfig, ModelConfig, OptimConfig, StageConfig, TrainConfig
from train.data import Sample
from train.estimate import Load, peak_flops
from train.loop import Data, Fit
from train.plan import Planner
from train.stages import Stage, draft_config
from train.stages import build_model as build_draft
from train.states import LiveStates

NUM_DRAFT = 7
MAX_STATE_BYTES = 24 * 2**30  # a baseline's cache above this is left out


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(job: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median of a few runs, after one that compiles and allocates."""
    job()
    taken = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        job()
        wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def training(name: str, plan: Plan, device: str) -> dict[str, Any]:
    """One sample a step, as a rank of the paper's run has: CE teacher, then CE + TV student."""
    target = random_target(name, device)
    torch.manual_seed(0)
    samples = []
    for i in range(4):
        ids = torch.randint(2, target.vocab_size - 1, (plan.sample_tokens,)).tolist()
        mask = [t > plan.sample_tokens // 8 for t in range(plan.sample_tokens)]
        samples.append(Sample(f"s{i}", ids, mask))
    stages = [
        StageConfig("teacher", "taps+history", LossConfig(ce=1.0)),
        StageConfig("stable", "taps", LossConfig(ce=0.1, tv=1.0)),
    ]
    config = TrainConfig(
        name="gpu_check",
        model=ModelConfig(num_hidden_layers=plan.draft_layers, num_taps=SIZES[name].num_taps),
        optim=OptimConfig(batch_size=1, anchors_per_sample=plan.anchors),
        stages=stages,
        mixed_precision="bf16",
    )
    return {"target": name, "stages": [_stage(target, s, samples, config, device) for s in stages]}


def _stage(
    target: TargetModel, stage: StageConfig, samples: list[Sample], config: TrainConfig, device: str
) -> dict[str, Any]:
    draft = draft_config(target, config.model, [])
    load = Load(
        len(samples[0].input_ids), config.optim.anchors_per_sample, len(samples[0].input_ids)
    )
    planner = Planner(config, target, draft, load, ranks=1)
    model = build_draft(planner.draft_of(stage), target, torch.ones(target.vocab_size), "random", 0)
    layers = tuple(sorted({k for s in config.stages for k in planner.draft_of(s).state_layer_ids}))
    torch.set_float32_matmul_precision("high")
    accelerator = Accelerator(mixed_precision="bf16")
    made = Stage(stage, model, target, None, config.optim.gamma)
    data = Data(samples, [], LiveStates(target, layers))
    fit = Fit(made, data, target, config, accelerator, Path("."))
    fit.step(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = iter(range(1, 100))
    taken = seconds(lambda: fit.step(next(step)), device, repeats=3)
    needs, work, limit = planner.memory(stage), planner.flops(stage), peak_flops(device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    accelerator.free_memory()
    return {
        "stage": stage.name,
        "trainable_parameters": sum(p.numel() for p in model.parameters()),
        "seconds_per_step": taken,
        "anchors_per_second": config.optim.anchors_per_sample / taken,
        "teraflops_per_step": work / 1e12,
        "mfu": work / taken / limit if limit else None,
        "peak_bytes": peak,
        "planned_peak_bytes": needs.peak,
        "planned_over_measured": needs.peak / peak if peak else None,
        "planned": asdict(needs),
    }


def drafting(name: str, plan: Plan, device: str) -> list[dict[str, Any]]:
    """A draft round by batch and context: DLite beside shapes that keep the history's keys.

    `eagle3`: one layer run K times, a token at a time, by the full LM head (a lower bound: its
    fusing layer is left out). The states are random: speed does not depend on them.
    """
    sizes, rows = SIZES[name], []
    tables = Tables(sizes, torch.bfloat16 if device == "cuda" else torch.float32, device)
    for shape in ("dlite", "dflash", "dspark", "eagle3"):
        eagle = shape == "eagle3"
        layers, num_draft = (1, 1) if eagle else (plan.draft_layers, NUM_DRAFT)
        model = build_model("dspark" if eagle else shape, sizes, layers, num_draft, tables)
        times = NUM_DRAFT if eagle else 1
        for batch in plan.batches:
            fitting = [c for c in plan.contexts if _cache_bytes(shape, sizes, layers, batch, c)]
            if not fitting:
                continue
            rounds = build_rounds("dspark" if eagle else shape, model, tables, batch, fitting)
            taps = torch.randn(batch, num_draft + 1, len(model.config.tap_ids), sizes.hidden_size)
            taps = taps.to(tables.head_weight_VD)
            for context in fitting:

                def draft(rounds: Rounds = rounds, context: int = context) -> object:
                    return rounds.round(context, taps, 2)  # noqa: B023

                one = seconds(draft, device)
                rows.append(
                    {
                        "target": name,
                        "shape": shape,
                        "batch": batch,
                        "context": context,
                        "seconds": one * times,
                        "state_bytes": rounds.state_bytes(context),
                    }
                )
            del rounds  # its cache, before the next one is made
    return rows


def _cache_bytes(shape: str, sizes: Any, layers: int, batch: int, context: int) -> bool:
    """Whether a baseline's cache fits; DLite has none."""
    size = 4 * batch * context * sizes.num_key_value_heads * sizes.head_dim * layers
    return shape == "dlite" or size <= MAX_STATE_BYTES


def verification(name: str, plan: Plan, device: str) -> dict[str, Any]:
    """The target's forward over N new tokens behind a context: what a planner trades against."""
    target = random_target(name, device)
    longest = max(plan.verify_tokens)
    cache = target.new_cache(1, plan.verify_context + longest)
    cache.lengths_B = [plan.verify_context]
    times = {}
    for num in plan.verify_tokens:
        tokens = torch.randint(2, target.vocab_size - 1, (1, num), device=device)

        def verify(tokens: torch.Tensor = tokens) -> None:
            target.logits(target.forward(tokens, cache).hidden_BTD)

        times[num] = seconds(verify, device)
    return {"target": name, "context": plan.verify_context, "seconds_by_tokens": times}
