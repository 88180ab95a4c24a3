"""Numbers that say what the stretches of a text are; `retrieval/native/marks.hpp` is the twin."""

from __future__ import annotations

from bisect import bisect_right


class Marks:
    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[int] = []

    def mark(self, start: int, value: int) -> None:
        """Of all that stands at `start` and behind."""
        if not self._values or self._values[-1] != value:
            self._starts.append(start)
            self._values.append(value)

    def at(self, position: int) -> int:
        return self._values[max(0, bisect_right(self._starts, position) - 1)]

    def cut(self, size: int) -> None:
        """Forgets the stretches that start at `size` or behind."""
        while self._starts and self._starts[-1] >= size:
            self._starts.pop()
            self._values.pop()

    def drop(self, count: int) -> None:
        """The first `count` positions are gone."""
        first = max(0, bisect_right(self._starts, count) - 1)
        self._values = self._values[first:]
        self._starts = [max(0, start - count) for start in self._starts[first:]]
