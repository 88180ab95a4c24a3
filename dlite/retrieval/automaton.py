"""Suffix automaton in pure Python: the twin of `native/automaton.hpp`, used where that isn't built.

A state is a set of substrings that end at the same positions. Beside the textbook's fields a state
keeps how often and where last it ended, updated along the suffix links at every token. That walk
is cut after `chain_cap` links (constant text would make it quadratic): only the shortest suffixes
miss updates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dlite.retrieval.base import END, Continuation, checked
from dlite.retrieval.choose import DEFAULT_BOUND, ROOT, choose
from dlite.retrieval.cursor import StateCursor
from dlite.retrieval.frozen import FrozenArrays, freeze

CHAIN_CAP = 64


def check_limits(chain_cap: int, search_bound: int) -> None:
    if chain_cap < 0 or chain_cap == 1:
        raise ValueError(f"chain_cap is {chain_cap}; give 0 (no cap) or an integer >= 2")
    if search_bound < 2:
        raise ValueError(f"search_bound is {search_bound}; give an integer >= 2")


class Automaton:
    """Index over a growing text; exact longest match. Raises ValueError for a bad limit."""

    def __init__(self, chain_cap: int = CHAIN_CAP, search_bound: int = DEFAULT_BOUND) -> None:
        check_limits(chain_cap, search_bound)
        self.chain_cap = chain_cap or 2**62
        self.search_bound = search_bound
        self.text: list[int] = []
        self.length = [0]
        self.link = [-1]
        self.first = [-1]
        self.last = [-1]
        self.count = [0]
        self.edges: list[dict[int, int]] = [{}]
        self._tail = ROOT
        self._segment_start = 0
        # State and length of the longest match, and its last earlier end (None: unknown).
        self._match: tuple[int, int, int | None] = (ROOT, 0, -1)
        self._closed = False

    def __len__(self) -> int:
        self.check_open()
        return len(self.text)

    def extend(self, tokens: Iterable[int]) -> None:
        self.check_open()
        self._extend(checked(tokens))

    def end_segment(self) -> None:
        self.check_open()
        self._extend([END])
        self._segment_start = len(self.text)
        self._match = (ROOT, 0, -1)

    def _extend(self, tokens: list[int]) -> None:
        text, edges, tail, cap = self.text, self.edges, self._tail, self.chain_cap
        earlier = -1
        length, link, first, last, count = (
            self.length,
            self.link,
            self.first,
            self.last,
            self.count,
        )
        for token in tokens:
            position = len(text)
            text.append(token)
            state = len(length)
            length.append(length[tail] + 1)
            first.append(position)
            last.append(-1)
            count.append(0)
            edges.append({})
            link.append(ROOT)
            parent = tail
            while parent >= 0 and token not in edges[parent]:
                edges[parent][token] = state
                parent = link[parent]
            if parent >= 0:
                child = edges[parent][token]
                if length[child] != length[parent] + 1:
                    child = self._split(parent, token, child)
                link[state] = child
            tail = state
            earlier, suffix, left = last[link[state]], state, cap
            while suffix > 0 and left:
                count[suffix] += 1
                last[suffix] = position
                suffix = link[suffix]
                left -= 1
        if tokens:
            self._tail, self._match = tail, (link[tail], length[link[tail]], earlier)
            self._stay_in_segment()

    def _split(self, parent: int, token: int, child: int) -> int:
        """A clone of `child` for those of its strings that now also end elsewhere."""
        clone, link, edges = len(self.length), self.link, self.edges
        self.length.append(self.length[parent] + 1)
        self.first.append(self.first[child])
        self.last.append(self.last[child])
        self.count.append(self.count[child])
        edges.append(edges[child].copy())
        link.append(link[child])
        link[child] = clone
        while parent >= 0 and edges[parent].get(token) == child:
            edges[parent][token] = clone
            parent = link[parent]
        return clone

    def _stay_in_segment(self) -> None:
        """A match that reaches over the segment's start is shortened to it."""
        state, length, earlier = self._match
        limit = len(self.text) - self._segment_start
        if length > limit:
            while state != ROOT and self.length[self.link[state]] >= limit:
                state = self.link[state]
                earlier = None
            self._match = (state, limit, earlier)

    def find(self, rule: int, max_tokens: int) -> Continuation:
        self.check_open()
        return choose(self, *self._match, rule, max_tokens, self.search_bound)

    def children(self, state: int) -> Iterable[tuple[int, int]]:
        return self.edges[state].items()

    def child(self, state: int, token: int) -> int:
        return self.edges[state].get(token, -1)

    def cursor(self) -> StateCursor:
        self.check_open()
        return StateCursor(self)

    def freeze(self) -> FrozenArrays:
        """Exact counts whatever the chain cap; states that a query can't reach are left out.

        Raises ValueError while a segment is open: `end_segment()` first.
        """
        self.check_open()
        if self.text and self.text[-1] != END:
            raise ValueError("the last segment is open; call end_segment() before freeze()")
        return freeze(self)

    def used_bytes(self) -> int:
        """Of the lists and dictionaries; the numbers in them are Python's."""
        self.check_open()
        columns = (self.text, self.length, self.link, self.first, self.last, self.count, self.edges)
        return sum(map(sys.getsizeof, columns)) + sum(map(sys.getsizeof, self.edges))

    def allocated_bytes(self) -> int:
        return self.used_bytes()

    def close(self) -> None:
        """Drops the text. Python can't wipe its numbers: the native index does."""
        self.__init__()
        self._closed = True

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("this index is closed; open a new one")
