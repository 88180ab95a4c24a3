"""One growing index of a session, and what is known of each stretch of its text.

A lane is what a running call extends with its own tokens, so calls that run at the same time
need a lane each and follow the others' lanes with cursors. Calls one after the other share one:
then a session is a single stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dlite.drafters.reader import make_marks
from dlite.drafters.token_log import TokenLog
from dlite.retrieval.base import END, Index

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Lane:
    """`log` is the index' text, without what a running call has generated. `marks` says who wrote
    it (`Session.label`)."""

    def __init__(self, make_index: Callable[[], Index]) -> None:
        self._make_index = make_index
        self.index = make_index()
        self.log = TokenLog()
        self.busy = False
        self.tail: object = None  # whose stream the text ends with, if it may go on
        self.marks = make_marks()

    @property
    def size(self) -> int:
        """The corpus position of the next token."""
        return len(self.index)

    def write(self, tokens: NDArray[np.int32]) -> None:
        self.index.extend(tokens)
        self.log.append(tokens)

    def end_segment(self) -> None:
        if len(self.log) and self.log.tokens[-1] != END:
            self.index.end_segment()
            self.log.append([END])

    def cut(self, size: int) -> bool:
        """Forgets what stands at `size` and behind; says whether there was any."""
        if self.size <= size:
            return False
        self.log.cut(size)
        self.marks.cut(size)
        self._rebuild()
        return True

    def keep_newest(self, num_tokens: int) -> None:
        old, dropped = self.log, max(0, len(self.log) - num_tokens)
        self.log = TokenLog()
        self.log.append(old.tokens[dropped:])
        old.close()
        self.marks.drop(dropped)
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
