"""Keys and values of requests that advance by their own counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache


class KVCache(Cache):
    """Preallocated keys and values, [rows, kv heads, capacity, H] per layer.

    Row b holds `lengths_B[b]` tokens. A forward writes behind them and moves nothing: `advance`
    makes as many of the written tokens permanent as were accepted, and the next forward
    overwrites the others. There may be more rows than requests; spare rows take `extend`.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        super().__init__(layers=[])
        # Zeros matter: what lies beyond a row's length is masked, but a NaN there would spread.
        self.keys = keys
        self.values = values
        self.lengths_B = [0] * keys[0].shape[0]
        self._end = 0
        self._at: tuple[Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def place(self, num_tokens: int) -> None:
        """Says that the next forward brings `num_tokens` per row, behind each row's length."""
        self._end = max(self.lengths_B) + num_tokens
        if self._end > self.capacity:
            self._resize(self.keys[0].shape[0], max(self._end, self.capacity * 3 // 2))
        self._at = None
        if len(set(self.lengths_B)) > 1:
            device = self.keys[0].device
            start_B1 = torch.tensor(self.lengths_B, device=device).unsqueeze(1)
            rows_B1 = torch.arange(len(self.lengths_B), device=device).unsqueeze(1)
            self._at = (rows_B1, start_B1 + torch.arange(num_tokens, device=device))

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, kv heads, T, H] of a layer; returns all entries up to the longest row's."""
        num_rows, _, num_tokens, _ = key_states.shape
        stored = []
        for buffer, new_BNTH in (
            (self.keys[layer_idx], key_states),
            (self.values[layer_idx], value_states),
        ):
            if self._at is None:
                buffer[:num_rows, :, self._end - num_tokens : self._end] = new_BNTH
            else:
                rows_B1, positions_BT = self._at
                buffer[rows_B1, :, positions_BT] = new_BNTH.transpose(1, 2)
            stored.append(buffer[:num_rows, :, : self._end])
        return stored[0], stored[1]

    def advance(self, counts: list[int]) -> None:
        """Keeps `counts[b]` of the tokens that the last forward wrote for row b."""
        self.lengths_B = [a + n for a, n in zip(self.lengths_B, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order. Only rows that change place are copied."""
        lengths = [self.lengths_B[row] for row in rows]
        moves = [(to, row) for to, row in enumerate(rows) if to != row]
        if moves:
            used = max(lengths)
            to, source = (list(side) for side in zip(*moves, strict=True))
            for buffer in (*self.keys, *self.values):
                buffer[to, :, :used] = buffer[source, :, :used]
        self.lengths_B = lengths

    def extend(self, other: KVCache) -> None:
        """Appends the other cache's rows, copying them into spare rows where there are some."""
        start, end = len(self.lengths_B), len(self.lengths_B) + len(other.lengths_B)
        used = max(other.lengths_B)
        if end > self.keys[0].shape[0] or used > self.capacity:
            self._resize(max(end, self.keys[0].shape[0]), max(used, self.capacity))
        pairs = zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True)
        for mine, theirs in pairs:
            mine[start:end, :, :used] = theirs[: end - start, :, :used]
        self.lengths_B = self.lengths_B + other.lengths_B

    def _resize(self, num_rows: int, capacity: int) -> None:
        for buffers in (self.keys, self.values):
            for index, buffer in enumerate(buffers):
                more = (0, 0, 0, capacity - buffer.shape[2], 0, 0, 0, num_rows - buffer.shape[0])
                buffers[index] = F.pad(buffer, more)
