"""What a draft forward reads, and which keys a block may see: one predicate for both forms.

History rows of several samples lie packed behind each other on one axis S. An anchor is known by
its own row on that axis (`row`) and by the first row of its sample (`start`), so neither sample
ids nor padding are needed. RoPE is relative: rows serve as positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """Target states of whole samples, packed along S, and where the anchors stand in them.

    `states_SCD` holds the C layers that the history branch reads. `row_A`, `start_A`: flat rows of
    the anchors and of the first position of their samples.
    """

    states_SCD: Tensor
    row_A: Tensor
    start_A: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The input of one draft forward over A anchors.

    `taps_ALD`: the target's states at a-1, layers in `tap_ids` order. `history`: for the history
    contexts, the states of all positions (layers `history_layer_ids`, or `tap_ids` where the
    context is history alone).
    """

    anchor_A: Tensor
    taps_ALD: Tensor
    history: History | None = None


def sees_history(
    row: Tensor, start: Tensor, key_row: Tensor, window: int, gap: int, sinks: int = 0
) -> Tensor:
    """True where the anchor at `row` sees history row `key_row`: same sample, before the anchor.

    The window holds positions a-W .. a-gap. gap is 2 where a-1 is read through the slots, else 1.
    `window` 0 means all positions; beside another one, the sample's first `sinks` positions stay
    in sight. Arguments broadcast.
    """
    seen = (key_row >= start) & (key_row <= row - gap)
    return seen & ((key_row >= row - window) | (key_row < start + sinks)) if window else seen


def window_rows(history: History, window: int, gap: int, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [A, C] of each anchor's window and sinks, clamped into S, and which it sees [A, C]."""
    row_A1, start_A1 = history.row_A[:, None], history.start_A[:, None]
    width = window or int((history.row_A - history.start_A).max())
    row_AC = row_A1 + torch.arange(-width, 1 - gap, device=row_A1.device)
    seen_AC = sees_history(row_A1, start_A1, row_AC, window, gap, sinks)
    if window and sinks:
        sink_AC = start_A1 + torch.arange(sinks, device=row_A1.device)
        seen_sink_AC = sees_history(row_A1, start_A1, sink_AC, window, gap, sinks)
        seen_sink_AC &= sink_AC < row_A1 - window  # inside the window they are there already
        row_AC = torch.cat([sink_AC, row_AC], dim=1)
        seen_AC = torch.cat([seen_sink_AC, seen_AC], dim=1)
    # Unseen rows before the first and after the last one are clamped to rows that there are.
    row_AC = row_AC.clamp(max=len(history.states_SCD) - 1)
    return row_AC.clamp(min=0), seen_AC
