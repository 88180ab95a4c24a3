"""The one training loop: every stage is data for it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from dlite.rates import acceptance_by_position, conditional_acceptance_by_position
from dlite.target import TargetModel
from dlite.types import tokens_per_step
from train.batches import Batch, assemble, num_steps_per_epoch, step_samples
from train.config import TrainConfig
from train.data import Sample, anchors
from train.optim import build_optimizer, learning_rate
from train.rollout import walk
from train.stages import Stage, relabel, t2draft
from train.state import Position, save_state
from train.states import States


@dataclass(slots=True)
class Data:
    train: Sequence[Sample]
    held_out: Sequence[Sample]
    states: States


def num_steps(stage: Stage, data: Data, config: TrainConfig) -> int:
    steps = stage.config.epochs * num_steps_per_epoch(len(data.train), config.optim.batch_size)
    return min(steps, stage.config.max_steps or steps)


class Fit:
    """One stage on one rank. `run` trains it from step `start` to its end.

    Every step is a function of (weights, optimizer, step): the order of samples of (seed, epoch),
    anchors of (seed, epoch, sample id), the learning rate of the step.
    """

    def __init__(
        self,
        stage: Stage,
        data: Data,
        target: TargetModel,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
    ) -> None:
        self.data, self.target, self.config, self.folder = data, target, config, folder
        self.accelerator, self.stage = accelerator, stage
        self.num_steps = num_steps(stage, data, config)
        self.optimizer = build_optimizer(stage.parameters(), config.optim)
        self.wrapped, self.optimizer = accelerator.prepare(stage, self.optimizer)
        self.t2draft_V = t2draft(stage.model)
        self.device = stage.model.norm.weight.device

    def run(self, start: int = 0) -> None:
        stage, config = self.stage, self.config
        bar = tqdm(
            range(start, self.num_steps),
            initial=start,
            total=self.num_steps,
            desc=stage.config.name,
            disable=not self.accelerator.is_main_process,
        )
        if start == 0:
            self.evaluate(0)
        for step in bar:
            began = time.perf_counter()
            loss, stats, num_anchors = self.step(step)
            done = step + 1
            if done % config.log_every == 0 or done == self.num_steps:
                line = {"loss": loss, "lr": self.rate(step), **summarise(stats)}
                line["anchors_per_second"] = num_anchors / (time.perf_counter() - began)
                self.log(done, line)
                bar.set_postfix(loss=f"{loss:.3f}", hit=f"{line['hit_by_position'][0]:.2f}")
            if done % config.eval_every == 0 or done == self.num_steps:
                self.evaluate(done)
            if done % config.save_every == 0 and done < self.num_steps:
                self.save(done)

    def rate(self, step: int) -> float:
        peak = self.stage.config.learning_rate or self.config.optim.learning_rate
        return learning_rate(step, self.num_steps, peak, self.config.optim.warmup_ratio)

    def step(self, step: int) -> tuple[float, dict[str, Tensor], int]:
        """One optimizer step: loss = global weighted sum / global weight over the micro-batches of
        all ranks. Returns this step's global loss, local statistics and the rank's anchors."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        batches = list(self.micro_batches(step))
        totals = self.global_totals(batches)
        world = self.accelerator.num_processes
        loss, stats = torch.zeros((), device=self.device), {}
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with self.accelerator.no_sync(self.wrapped) if not last else nullcontext():
                part, counts = self.wrapped(batch, totals)
                # Data-parallel wrappers average gradients over ranks; the loss is a global sum.
                self.accelerator.backward(part * world)
            loss += part.detach()
            stats = {k: stats.get(k, 0) + v for k, v in counts.items()}
        summed = self.accelerator.reduce(loss, "sum")
        assert isinstance(summed, Tensor)
        value = float(summed)
        self.check_finite(value, step)
        self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value, stats, sum(len(b.prev_AK) for b in batches)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        optim, seed = self.config.optim, self.config.seed
        samples, epoch = step_samples(self.data.train, step, optim.batch_size, seed)
        mine = samples[self.accelerator.process_index :: self.accelerator.num_processes]
        size = optim.micro_batch_size or len(mine)
        for i in range(0, len(mine), size):
            part = mine[i : i + size]
            batch = assemble(
                part,
                [anchors(s, seed, epoch, optim.anchors_per_sample) for s in part],
                self.data.states,
                self.stage.model.config,
                self.t2draft_V,
                with_history=self.stage.with_history,
                device=self.device,
            )
            if self.stage.config.labels == "argmax":
                relabel(batch, self.target, self.t2draft_V)
            yield batch

    def global_totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        weights = [b.labels.weights(self.config.optim.gamma) for b in batches]
        names = ("ce", "kl", "tv", "tau")
        sums = torch.tensor([sum(w[n] for w in weights) for n in names], dtype=torch.float64)
        summed = self.accelerator.reduce(sums.to(self.device), "sum")
        assert isinstance(summed, Tensor)
        return dict(zip(names, summed.tolist(), strict=True))

    def check_finite(self, loss: float, step: int) -> None:
        if math.isfinite(loss):
            return
        named = list(self.stage.model.named_parameters())
        tensors = [("weights", name, p) for name, p in named]  # a bad weight spoils all gradients
        tensors += [("gradient", name, p.grad) for name, p in named if p.grad is not None]
        for what, name, tensor in tensors:
            if not tensor.isfinite().all():
                raise ValueError(
                    f"stage {self.stage.config.name}, step {step}: loss is {loss}, first bad "
                    f"tensor: {what} of {name}; lower optim.learning_rate or check the data"
                )
        raise ValueError(
            f"stage {self.stage.config.name}, step {step}: loss is {loss} with finite weights and "
            "gradients; the target's states are broken, check its dtype"
        )

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Rollout acceptance on the held-out samples, and the same losses as in training."""
        if not self.accelerator.is_main_process or not self.data.held_out:
            return
        stage, model = self.stage, self.stage.model
        model.eval()
        with_history = model.config.context != "taps"
        rounds = walk(model, self.data.held_out, self.data.states, with_history=with_history)
        line = {
            "tau": tokens_per_step(rounds),
            "acceptance_by_position": acceptance_by_position(rounds),
            "conditional_acceptance_by_position": conditional_acceptance_by_position(rounds),
        }
        stats: dict[str, Tensor] = {}
        for i in range(0, len(self.data.held_out), 8):
            part = self.data.held_out[i : i + 8]
            batch = assemble(
                part,
                [anchors(s, self.config.seed, -1, 16) for s in part],
                self.data.states,
                model.config,
                self.t2draft_V,
                with_history=stage.with_history,
                device=self.device,
            )
            _, counts = stage(batch, batch.labels.weights(self.config.optim.gamma))
            stats = {k: stats.get(k, 0) + v for k, v in counts.items()}
        self.log(step, line | {f"held_out_{k}": v for k, v in summarise(stats).items()})
        model.train()

    def log(self, step: int, values: dict) -> None:
        if not self.accelerator.is_main_process:
            return
        line = {"stage": self.stage.config.name, "step": step, **values}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        flat = {f"{line['stage']}/{k}": v for k, v in values.items() if not isinstance(v, list)}
        self.accelerator.log(flat, step=step)

    def save(self, step: int) -> None:
        position = Position(self.stage.config.name, step)
        save_state(self.accelerator, self.folder / "state", position, self.config.keep_states)


def summarise(stats: dict[str, Tensor]) -> dict[str, float | list[float]]:
    """Statistics of `vocab_loss` as rates: by position, and CE and TV over all positions."""
    num_K = stats["num"].clamp(min=1)
    total = float(stats["num"].sum().clamp(min=1))
    rates: dict[str, float | list[float]] = {
        "ce": float(stats["ce"].sum() / stats["covered"].sum().clamp(min=1)),
        "coverage": float(stats["covered"].sum()) / total,
        "hit_by_position": (stats["hits"] / num_K).tolist(),
    }
    if float(stats["overlap"].sum()) > 0:
        overlap_K = stats["overlap"] / num_K
        rates["tv"] = 2 * (1 - float(stats["overlap"].sum()) / total)
        rates["overlap_by_position"] = overlap_K.tolist()
        # Per anchor, then averaged: a product of average overlaps would be another number.
        rates["expected_tau"] = 1 + float(stats["survival"].sum() / num_K[0])
    return rates
