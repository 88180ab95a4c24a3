"""Acceptance from the drafter's own rollouts along recorded answers: no target forward is needed.

A greedy answer of the target is the path that greedy speculative decoding would take, so walking
it (draft, accept while equal, move on) gives the rounds that decoding would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks
from dlite.types import Round
from train.batches import assemble
from train.data import Sample
from train.states import States


def answers(sample: Sample) -> list[tuple[int, int]]:
    """Runs [first, end) of supervised positions: what the target generated, turn by turn."""
    runs, start = [], None
    for position, supervised in enumerate([*sample.loss_mask, False]):
        if supervised and start is None:
            start = position
        elif not supervised and start is not None:
            runs.append((start, position))
            start = None
    return runs


@torch.no_grad()
def walk(
    model: DraftModel, samples: Sequence[Sample], states: States, *, with_history: bool = False
) -> list[Round]:
    """Greedy rounds of `model` along the answers of all samples, batched over samples."""
    num_draft = model.config.num_draft_tokens
    device = model.norm.weight.device
    todo = [[s, first, end] for s in samples for first, end in answers(s) if end - first > 1]
    unused_V = torch.full((model.config.vocab_size,), -1)
    rounds = []
    while todo:
        batch = assemble(
            [s for s, _, _ in todo],
            [[anchor] for _, anchor, _ in todo],
            states,
            model.config,
            unused_V,
            with_history=with_history,
            device=device,
        )
        drafts_AK, _ = model.draft(
            Blocks(batch.blocks.anchor_A, batch.blocks.taps_ALD, batch.history)
        )
        accepted = num_accepted(drafts_AK, batch.labels.label_AK, batch.labels.valid_AK)
        for item, n in zip(todo, accepted, strict=True):
            left = item[2] - 1 - item[1]  # tokens of the answer behind the anchor
            emitted = min(n + 1, left)
            drafted = min(num_draft, left - 1)
            cut = emitted == left
            rounds.append(
                Round(item[0].id, drafted, min(n, drafted), emitted, cut, model.config.context)
            )
            item[1] += emitted
        todo = [item for item in todo if item[1] < item[2] - 1]
    return rounds


def num_accepted(drafts_AK: Tensor, label_AK: Tensor, valid_AK: Tensor) -> list[int]:
    """How many leading draft tokens equal the recorded ones."""
    return ((drafts_AK == label_AK) & valid_AK).cumprod(-1).sum(-1).tolist()
