"""Which ids samples hold, and how often: kept with samples on disk, else counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlite.target import TargetModel
from train.data import Sample
from train.stored import StoredSamples


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Tensor:
    """How often each id is a label, int64 [V]: what a pruned draft vocabulary is chosen by."""
    if isinstance(samples, StoredSamples):
        others = samples.picked(samples.left_out())
        return samples.counts("label") - token_counts([*others], vocab_size)
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)
        counts_V += ids[torch.tensor(sample.loss_mask)].bincount(minlength=vocab_size)
    return counts_V


def check_mask_id(mask_id: int, samples: Sequence[Sample], target: TargetModel) -> None:
    """Raises ValueError for a placeholder id that is pad, an end token, or in the data."""
    remedy = "choose an id that no text has, or mask_token_id=null (a learned placeholder)"
    if not 0 <= mask_id < target.vocab_size:
        raise ValueError(
            f"mask_token_id {mask_id} is outside the target's {target.vocab_size} ids; {remedy}"
        )
    if mask_id == target.pad_id or mask_id in target.eos_ids:
        kind = "an end token" if mask_id in target.eos_ids else "the padding id"
        raise ValueError(f"mask_token_id {mask_id} is {kind} of the target; {remedy}")
    if isinstance(samples, StoredSamples):
        if samples.counts("anywhere")[mask_id]:
            raise ValueError(f"mask_token_id {mask_id} occurs in {samples.folder}; {remedy}")
        return
    for sample in samples:
        if mask_id in sample.input_ids:
            raise ValueError(f"mask_token_id {mask_id} occurs in sample {sample.id!r}; {remedy}")
