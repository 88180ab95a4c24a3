"""The target's hidden states out of vLLM's own forward.

Ours: id k = output of 0-based layer k, the last one after the final norm. vLLM's: id k = the
residual stream before layer k. So our k is vLLM's k + 1, except the last: vLLM's last state is
*before* the final norm, ours is the forward's result. vLLM gives states in ascending order,
whatever order was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vllm_layer_ids(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    return tuple(k + 1 for k in sorted(tap_ids) if k != num_layers - 1)


def decision_rows(
    starts: Sequence[int], num_verified: Sequence[int], num_sampled: Sequence[int]
) -> list[int]:
    """Rows of the forward that sampled each request's last token: the position before its anchor.

    `starts` are the first rows of all requests and the end. A request that sampled nothing (its
    prompt is not yet read) has row -1.
    """
    return [
        end - 1 - verified + sampled - 1 if sampled else -1
        for end, verified, sampled in zip(starts[1:], num_verified, num_sampled, strict=True)
    ]


def gather(
    rows: Sequence[int], hidden_ND: Tensor, aux: Sequence[Tensor], *, with_last: bool
) -> Tensor:
    """Taps [B, L, D] at `rows`, layers ascending; `with_last`: the final-normed state is one."""
    row_B = torch.tensor(rows, device=hidden_ND.device)
    states = [*aux, *([hidden_ND] if with_last else [])]
    return torch.stack([state_ND[row_B] for state_ND in states], dim=1)
