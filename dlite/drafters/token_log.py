"""Tokens kept beside an index, in memory that is zeroed before it is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """How many tokens the two begin with alike."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


class TokenLog:
    def __init__(self) -> None:
        self._data = np.empty(0, dtype=np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> NDArray[np.int32]:
        """A view; it is all zeros once the log has grown or closed."""
        return self._data[: self._size]

    def append(self, tokens: ArrayLike) -> None:
        new = np.asarray(tokens, dtype=np.int32)
        size = self._size + len(new)
        if size > len(self._data):
            grown = np.zeros(max(size, len(self._data) * 3 // 2), dtype=np.int32)
            grown[: self._size] = self.tokens
            self._data.fill(0)
            self._data = grown
        self._data[self._size : size] = new
        self._size = size

    def cut(self, size: int) -> None:
        self._data[size : self._size] = 0
        self._size = min(size, self._size)

    def close(self) -> None:
        self._data.fill(0)
        self._size = 0
