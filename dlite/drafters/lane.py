"""One growing index of a session, and what is known of each stretch of its text.

A lane is what a running call extends with its own tokens, so calls that run at the same time
need a lane each and follow the others' lanes with cursors. Calls one after the other share one:
then a session is a single stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlite.drafters.token_log import TokenLog
from dlite.retrieval.base import END, Index

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Label:
    """Who wrote a stretch of text, and in which block; `block` None: a prompt, a tool output."""

    agent: str
    query: str
    block: Hashable


class Lane:
    """`size` is the corpus position of the next token."""

    def __init__(self, make_index: Callable[[], Index]) -> None:
        self._make_index = make_index
        self.index = make_index()
        self.log = TokenLog()
        self.pending: list[int] = []  # indexed, not yet logged: tokens of the running call
        self.busy = False
        self.tail: object = None  # whose stream the text ends with, if it may go on
        self._starts: list[int] = []
        self._labels: list[Label] = []

    @property
    def size(self) -> int:
        return len(self.log) + len(self.pending)

    def write(self, tokens: NDArray[np.int32]) -> None:
        self.index.extend(tokens)
        self.log.append(tokens)

    def label(self, label: Label) -> None:
        """Of what is written from here on."""
        if not self._labels or self._labels[-1] != label:
            self._starts.append(self.size)
            self._labels.append(label)

    def label_at(self, position: int) -> Label:
        return self._labels[bisect_right(self._starts, position) - 1]

    def end_segment(self) -> None:
        self.flush()
        if len(self.log) and self.log.tokens[-1] != END:
            self.index.end_segment()
            self.log.append([END])

    def flush(self) -> None:
        if self.pending:
            self.log.append(self.pending)
            self.pending.clear()

    def cut(self, size: int) -> bool:
        """Forgets what stands at `size` and behind; says whether there was any."""
        if self.size <= size:
            return False
        self.log.cut(size)
        self.pending.clear()
        while self._starts and self._starts[-1] >= size:
            self._starts.pop()
            self._labels.pop()
        self._rebuild()
        return True

    def keep_newest(self, num_tokens: int) -> None:
        self.flush()
        old, dropped = self.log, max(0, len(self.log) - num_tokens)
        self.log = TokenLog()
        self.log.append(old.tokens[dropped:])
        old.close()
        first = bisect_right(self._starts, dropped) - 1
        self._labels = self._labels[max(0, first) :]
        self._starts = [max(0, start - dropped) for start in self._starts[max(0, first) :]]
        self._rebuild()

    def _rebuild(self) -> None:
        self.index.close()
        self.index = self._make_index()
        tokens = self.log.tokens
        ends = [*np.flatnonzero(tokens == END).tolist(), len(tokens)]
        begin = 0
        for end in ends:
            self.index.extend(tokens[begin:end])
            if end < len(tokens):
                self.index.end_segment()
            begin = end + 1

    def close(self) -> None:
        self.index.close()
        self.log.close()
        self.pending.clear()
