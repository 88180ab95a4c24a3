"""From samples and anchors to the tensors of one forward. Pure functions of their arguments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.losses import Labels
from dlite.model.masks import Blocks, History
from train.data import Sample
from train.states import States


@dataclass(slots=True)
class Batch:
    """What a student (`blocks`) and a teacher (`history` too) read, and their labels."""

    blocks: Blocks
    history: History | None
    prev_AK: Tensor
    labels: Labels


@lru_cache(maxsize=1)  # every step asks, and two million indices take a second
def order(num_samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of an epoch: a function of (seed, epoch) alone."""
    indices = list(range(num_samples))
    random.Random(f"order {seed} {epoch}").shuffle(indices)
    return tuple(indices)


def num_steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Optimizer steps in an epoch; the last one may hold fewer samples."""
    return -(-num_samples // batch_size)


def step_samples(
    samples: Sequence[Sample], step: int, batch_size: int, seed: int
) -> tuple[list[Sample], int]:
    """The samples of optimizer step `step` of a stage, and the epoch that it falls in."""
    epoch, index = divmod(step, num_steps_per_epoch(len(samples), batch_size))
    picked = order(len(samples), seed, epoch)[index * batch_size : (index + 1) * batch_size]
    return [samples[i] for i in picked], epoch


def label_rows(anchor_A: Tensor, sample: Sample, num_draft: int) -> tuple[Tensor, Tensor]:
    """Positions a+1 .. a+K [A, K], clamped into the sample, and the cumulative supervision."""
    position_AK = anchor_A[:, None] + torch.arange(1, num_draft + 1)
    inside_AK = position_AK < len(sample.input_ids)
    position_AK = position_AK.clamp(max=len(sample.input_ids) - 1)
    mask_S = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return position_AK, (inside_AK & mask_S[position_AK]).cumprod(-1).bool()


def supervision(
    samples: Sequence[Sample],
    anchors: Sequence[Sequence[int]],
    num_draft: int,
    t2draft_V: Tensor,
) -> Labels:
    """Labels of all anchors without the target's states: enough for their weights."""
    labels, valid = [], []
    for sample, drawn in zip(samples, anchors, strict=True):
        anchor_A = torch.tensor(list(drawn), dtype=torch.long)
        position_AK, valid_AK = label_rows(anchor_A, sample, num_draft)
        labels.append(torch.tensor(sample.input_ids)[position_AK])
        valid.append(valid_AK)
    label_AK = torch.cat(labels)
    return Labels(label_AK, t2draft_V[label_AK], torch.cat(valid), torch.empty(0))


def assemble(
    samples: Sequence[Sample],
    anchors: Sequence[Sequence[int]],
    states: States,
    config: DraftConfig,
    t2draft_V: Tensor,
    *,
    with_history: bool,
    device: str | torch.device = "cpu",
) -> Batch:
    """The tensors of all anchors of `samples`, one after the other.

    `t2draft_V` maps target ids to draft ids, -1 outside the draft vocabulary.
    """
    layer = {k: i for i, k in enumerate(states.layer_ids)}
    tap_columns = [layer[k] for k in config.tap_ids]
    captured, log_z = states.get(samples), states.log_z(samples)
    columns: dict[str, list[Tensor]] = {}
    start, packed = 0, []
    for i, sample in enumerate(samples):
        ids_S, states_SCD = torch.tensor(sample.input_ids), captured[i]
        anchor_A = torch.tensor(list(anchors[i]), dtype=torch.long)
        label_AK, valid_AK = label_rows(anchor_A, sample, config.num_draft_tokens)
        row_AK = label_AK - 1
        previous = ids_S[row_AK]
        parts = {
            "anchor": ids_S[anchor_A],
            "taps": states_SCD[anchor_A - 1][:, tap_columns],
            "prev": previous,
            "label": ids_S[label_AK],
            "valid": valid_AK,
            "state": states_SCD[row_AK, -1],
            "row": start + anchor_A,
            "start": torch.full_like(anchor_A, start),
        }
        if log_z is not None:
            parts["log_z"] = log_z[i][row_AK]
        for name, value in parts.items():
            columns.setdefault(name, []).append(value)
        if with_history:
            packed.append(states_SCD[:, [layer[k] for k in config.packed_layer_ids]])
            start += len(states_SCD)
    tensors = {name: torch.cat(values).to(device) for name, values in columns.items()}
    history = None
    if with_history:
        history = History(torch.cat(packed).to(device), tensors["row"], tensors["start"])
    return Batch(
        Blocks(tensors["anchor"], tensors["taps"]),
        history,
        tensors["prev"],
        Labels(
            tensors["label"],
            t2draft_V.to(device)[tensors["label"]],
            tensors["valid"],
            tensors["state"],
            tensors.get("log_z"),
        ),
    )
