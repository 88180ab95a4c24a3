"""Which ids a pruned draft vocabulary keeps, from token counts alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def vocab_maps(
    counts_V: Tensor,
    draft_vocab_size: int,
    *,
    always: Iterable[int] = (),
    num_real_ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`d2t` int64 [Dv], target id = draft id + d2t[draft id], and `t2d` bool [V], the ids kept.

    Keeps the `always` ids (end tokens) and the most frequent others; ids never seen, lowest first,
    fill up to the exact size. Draft ids ascend with target ids. Rows from `num_real_ids` on pad the
    target's table, have no token, and are never kept. Raises ValueError when the sizes disagree.
    """
    num_ids = len(counts_V) if num_real_ids is None else num_real_ids
    kept = sorted(set(always))
    if num_ids > len(counts_V):
        raise ValueError(
            f"num_real_ids is {num_ids}, but counts were given for {len(counts_V)} ids; "
            "count with minlength = the target's vocab_size"
        )
    if kept and not 0 <= kept[0] <= kept[-1] < num_ids:
        raise ValueError(f"always-kept ids {kept} must lie in 0 .. {num_ids - 1}")
    if not max(1, len(kept)) <= draft_vocab_size <= num_ids:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}; give {max(1, len(kept))} (the ids always "
            f"kept) to {num_ids} (the ids that the tokenizer knows)"
        )
    rank_V = counts_V[:num_ids].to(torch.float64, copy=True)
    rank_V[kept] = torch.inf
    chosen = rank_V.argsort(descending=True, stable=True)[:draft_vocab_size]
    t2d = torch.zeros(len(counts_V), dtype=torch.bool)
    t2d[chosen.cpu()] = True
    d2t = t2d.nonzero().squeeze(-1) - torch.arange(draft_vocab_size)
    return d2t, t2d


def draft_to_target(d2t: Tensor) -> Tensor:
    """The target id of every draft id, int64 [Dv]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
