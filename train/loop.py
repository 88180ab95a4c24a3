"""The one training loop: every stage is data for it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from dlite.model.drafter import DraftModel
from dlite.target import TargetModel
from train.batches import Batch, assemble, num_steps_per_epoch, step_samples, supervision
from train.cache import CachedStates
from train.config import TrainConfig
from train.data import Sample, anchors
from train.distributed import accumulating, splits_weights, whole_weights
from train.estimate import Load, TargetSizes, flops, peak_flops
from train.finite import check_finite
from train.held_out import draft_for, summarise
from train.optim import build_optimizer, learning_rate
from train.packing import deal
from train.signals import Interrupted, Stop
from train.stages import Stage, relabel, t2draft
from train.state import Position, Trained, save_state
from train.states import States
from train.work import Step, Work


@dataclass(slots=True)
class Data:
    train: Sequence[Sample]
    held_out: Sequence[Sample]
    states: States


@dataclass(slots=True)
class Part:
    """A micro-batch to come. A `silent` one keeps its rank in step and trains nothing."""

    samples: Sequence[Sample]
    anchors: list[list[int]]
    silent: bool = False


def num_steps(stage: Stage, data: Data, config: TrainConfig) -> int:
    steps = stage.config.epochs * num_steps_per_epoch(len(data.train), config.optim.batch_size)
    return min(steps, stage.config.max_steps or steps)


class Fit:
    """One stage on one rank. `run` trains it from step `start` to its end.

    Every step is a function of (weights, optimizer, step): the order of samples of (seed, epoch),
    anchors of (seed, epoch, sample id), the learning rate of the step, whatever else is random of
    (seed, step, rank). So it makes no difference where a run was interrupted.
    """

    def __init__(
        self,
        stage: Stage,
        data: Data,
        target: TargetModel,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
        *,
        stop: Stop | None = None,
        keep_best: Callable[[Stage, int, float], None] | None = None,
    ) -> None:
        self.data, self.target, self.config, self.folder = data, target, config, folder
        self.accelerator, self.stage = accelerator, stage
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.num_steps = num_steps(stage, data, config)
        self.t2draft_V = t2draft(stage.model)
        self.device = stage.model.norm.weight.device
        self.optimizer = build_optimizer(stage.parameters(), config.optim)
        self.wrapped, self.optimizer = accelerator.prepare(stage, self.optimizer)
        self.trained = Trained(accelerator, self.wrapped, self.optimizer)
        self.stop, self.keep_best = stop or Stop(), keep_best

    def run(self, start: int = 0) -> None:
        """Raises Interrupted, with the state saved, after the step in which a signal came."""
        bar = tqdm(
            range(start, self.num_steps),
            initial=start,
            total=self.num_steps,
            desc=self.stage.config.name,
            disable=not self.accelerator.is_main_process,
        )
        self.evaluate(start)
        work = Work()
        for step in bar:
            did, done = self.step(step), step + 1
            work.add(did)
            if done % self.config.log_every == 0 or done == self.num_steps:
                self.log_step(done, did, work, bar)
                work = Work()
            if did.stop or (done % self.config.save_every == 0 and done < self.num_steps):
                self.save(done)
            if did.stop:
                raise Interrupted(did.stop)
            # Behind the save: a resumed run evaluates where it starts.
            self.evaluate(done)

    def rate(self, step: int) -> float:
        peak = self.stage.config.learning_rate or self.config.optim.learning_rate
        return learning_rate(step, self.num_steps, peak, self.config.optim.warmup_ratio)

    def step(self, step: int) -> Step:
        """One optimizer step: loss = global weighted sum / global weight over the micro-batches of
        all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self._seed(step)
        parts = self.parts(step)
        totals = self.global_totals(parts)
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        did = Step(math.nan, math.nan, {}, 0, 0, 0)
        for i, part in enumerate(parts):
            batch = self.batch(part)
            with accumulating(self.accelerator, self.wrapped, last=i == len(parts) - 1):
                share, counts = self.wrapped(batch, totals)
                # Data-parallel wrappers average gradients over ranks; the loss is a global sum.
                self.accelerator.backward(share * self.world)
            loss += share.detach()
            did.stats = {k: did.stats.get(k, 0) + v for k, v in counts.items()}
            if not part.silent:
                did.num_anchors += len(batch.prev_AK)
                did.num_tokens += sum(len(s.input_ids) for s in part.samples)
                did.num_supervised += sum(sum(s.loss_mask) for s in part.samples)
        heard = torch.tensor(float(self.stop.number), device=self.device, dtype=torch.float64)
        summed = self.accelerator.reduce(torch.stack([loss, heard]), "sum")
        assert isinstance(summed, Tensor)
        did.loss = float(summed[0])
        check_finite(did.loss, self.stage, step)
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.config.optim.clip)
        did.grad_norm = math.nan if norm is None else float(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        did.stop = self._agreed(int(summed[1]))
        return did

    def _agreed(self, heard: int) -> int:
        """The signal that ended the run; `heard` is the sum of all ranks' signal numbers."""
        if not heard:
            return 0
        return max(gather_object([self.stop.number]))

    def _seed(self, step: int) -> None:
        key = f"{self.config.seed} {self.stage.config.name} {step} {self.rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "big"))

    def parts(self, step: int) -> list[Part]:
        """This rank's micro-batches: as many as every other rank's."""
        optim, seed = self.config.optim, self.config.seed
        samples, epoch = step_samples(self.data.train, step, optim.batch_size, seed)
        shares = deal(
            samples, self.world, size=optim.micro_batch_size, tokens=optim.micro_batch_tokens
        )
        drawn = {
            s.id: anchors(s, seed, epoch, optim.anchors_per_sample, self.pool(s)) for s in samples
        }
        first = samples[0]
        return [
            Part(part, [drawn[s.id] for s in part])
            if part
            else Part([first], [drawn[first.id][:1]], silent=True)
            for part in shares[self.rank]
        ]

    def pool(self, sample: Sample) -> list[int] | None:
        states = self.data.states
        return states.pool(sample) if isinstance(states, CachedStates) else None

    def batch(self, part: Part) -> Batch:
        batch = assemble(
            part.samples,
            part.anchors,
            self.data.states,
            self.stage.model.config,
            self.t2draft_V,
            with_history=self.stage.with_history,
            device=self.device,
        )
        if self.stage.config.labels == "argmax":
            relabel(batch, self.target, self.t2draft_V)
        if part.silent:
            batch.labels.valid_AK = torch.zeros_like(batch.labels.valid_AK)
        return batch

    def global_totals(self, parts: Sequence[Part]) -> dict[str, float]:
        """Total weights of the loss terms over all micro-batches of all ranks.

        Known from the samples alone, before any forward, so that no micro-batch is kept: except
        which argmax labels a pruned vocabulary covers, which needs the states once more.
        """
        config = self.stage.model.config
        looked_up = self.stage.config.labels == "argmax" and config.pruned
        names = ("ce", "kl", "tv", "tau")
        sums = torch.zeros(len(names), dtype=torch.float64)
        for part in parts:
            if part.silent:
                continue
            labels = (
                self.batch(part).labels
                if looked_up
                else supervision(
                    part.samples, part.anchors, config.num_draft_tokens, self.t2draft_V
                )
            )
            weights = labels.weights(self.config.optim.gamma)
            sums += torch.tensor([weights[name] for name in names], dtype=torch.float64)
        summed = self.accelerator.reduce(sums.to(self.device), "sum")
        assert isinstance(summed, Tensor)
        return dict(zip(names, summed.tolist(), strict=True))

    def whole(self) -> Stage:
        """The stage with all of its weights on this rank. All ranks must call it."""
        if not splits_weights(self.accelerator):
            return self.stage
        weights = whole_weights(self.accelerator, self.stage.model)
        model = DraftModel(self.stage.model.config)
        model.load_state_dict(weights)
        model.to(self.device).bind(self.target)
        return Stage(self.stage.config, model, self.target, self.stage.teacher, self.stage.gamma)

    def evaluate(self, step: int) -> None:
        """Rollout acceptance on the held-out samples, and the same losses as in training."""
        due = step % self.config.eval_every == 0 or step == self.num_steps
        if not due or not self.data.held_out:
            return
        mine = self.data.held_out[self.rank :: self.world]
        stage = self.whole()
        seed = self.config.seed
        found = draft_for(
            stage, mine or self.data.held_out[:1], self.data.states, self.t2draft_V, seed
        )
        if not mine:
            found.rounds = []
            found.stats = {k: torch.zeros_like(v) for k, v in found.stats.items()}
        found.rounds = gather_object(found.rounds)
        found.stats = self.global_stats(found.stats)
        acceptance = found.acceptance()
        line = acceptance | {f"held_out_{k}": v for k, v in summarise(found.stats).items()}
        if self.keep_best is not None and self.accelerator.is_main_process:
            self.keep_best(stage, step, acceptance["tau"])
        self.log(step, line)

    def global_stats(self, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        names = sorted(stats)
        summed = self.accelerator.reduce(torch.stack([stats[n] for n in names]), "sum")
        assert isinstance(summed, Tensor)
        return dict(zip(names, summed, strict=True))

    def log_step(self, done: int, did: Step, work: Work, bar: tqdm) -> None:
        local = torch.tensor(work.speeds(), device=self.device)
        summed = self.accelerator.reduce(local, "sum")
        assert isinstance(summed, Tensor)
        anchors, tokens, supervised = summed.tolist()
        rates = summarise(self.global_stats(did.stats))
        line = {"loss": did.loss, "grad_norm": did.grad_norm, "lr": self.rate(done - 1), **rates}
        line |= {"anchors_per_second": anchors, "supervised_tokens_per_second": supervised}
        if peak := peak_flops(self.device):
            line["mfu"] = self.flops_per_second(anchors, tokens) / peak / self.world
        self.log(done, line)
        hit_K = rates["hit_by_position"]
        assert isinstance(hit_K, list)
        bar.set_postfix(loss=f"{did.loss:.3f}", hit=f"{hit_K[0]:.2f}")

    def flops_per_second(self, anchors: float, tokens: float) -> float:
        teacher = self.stage.teacher
        return flops(
            self.stage.model.config,
            TargetSizes.of(self.target),
            Load(round(tokens), round(anchors), self.config.data.max_length),
            teacher=teacher.config if teacher is not None else None,
            target_logits=bool(self.stage.loss.tv or self.stage.loss.tau),
        )

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
        save_state(self.trained, self.folder / "state", position, self.config.keep_states)
