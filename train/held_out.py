"""How well a drafter drafts for answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite.rates import acceptance_by_position, conditional_acceptance_by_position
from dlite.types import Round, tokens_per_step
from train.batches import assemble
from train.data import Sample, anchors
from train.rollout import walk
from train.stages import Stage
from train.states import KeptStates, LiveStates, States

ANCHORS_PER_SAMPLE = 16


@dataclass(slots=True)
class HeldOut:
    """Rounds of the drafter's own rollouts, and sums of the training losses' statistics."""

    rounds: list[Round]
    stats: dict[str, Tensor]

    def acceptance(self) -> dict:
        return {
            "tau": tokens_per_step(self.rounds),
            "acceptance_by_position": acceptance_by_position(self.rounds),
            "conditional_acceptance_by_position": conditional_acceptance_by_position(self.rounds),
        }


@torch.no_grad()
def draft_for(
    stage: Stage, samples: Sequence[Sample], states: States, t2draft_V: Tensor, seed: int
) -> HeldOut:
    model = stage.model
    with_history = model.config.context != "taps"
    model.eval()
    rounds: list[Round] = []
    stats: dict[str, Tensor] = {}
    if not isinstance(states, LiveStates):
        rounds = walk(model, samples, states, with_history=with_history)
    for i in range(0, len(samples), 8):
        part, source = samples[i : i + 8], states
        if isinstance(states, LiveStates):  # a walk reads the same states round after round
            source = KeptStates(states, part)
            rounds += walk(model, part, source, with_history=with_history)
        batch = assemble(
            part,
            [anchors(s, seed, -1, ANCHORS_PER_SAMPLE) for s in part],
            source,
            model.config,
            t2draft_V,
            with_history=stage.with_history,
            device=model.norm.weight.device,
        )
        _, counts = stage(batch, batch.labels.weights(stage.gamma))
        stats = {k: stats.get(k, 0) + v for k, v in counts.items()}
    model.train()
    return HeldOut(rounds, stats)


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
