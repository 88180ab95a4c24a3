"""A static corpus: a suffix automaton turned into flat arrays that a file can hold.

Edges are sorted by token, state after state, so that a search needs no hash table; counts are
exact. Nothing in the arrays is ever written again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from dlite.retrieval.base import END
from dlite.retrieval.choose import DEFAULT_BOUND, ROOT
from dlite.retrieval.cursor import StateCursor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlite.retrieval.automaton import Automaton


@dataclass(frozen=True, slots=True, eq=False)
class FrozenArrays:
    """int32, one-dimensional. State s owns the edges `edge_start[s] .. edge_start[s + 1] - 1`."""

    text: NDArray[np.int32]
    length: NDArray[np.int32]
    link: NDArray[np.int32]
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    count: NDArray[np.int32]
    edge_start: NDArray[np.int32]
    edge_token: NDArray[np.int32]
    edge_target: NDArray[np.int32]

    def named(self) -> dict[str, NDArray[np.int32]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self) -> None:
        """Raises ValueError where following the arrays would leave them."""
        states, edges = len(self.length), len(self.edge_token)
        columns = (self.length, self.link, self.first, self.last, self.count)
        sound = (
            all(array.ndim == 1 and array.dtype == np.int32 for array in self.named().values())
            and states > 0
            and all(len(column) == states for column in columns)
            and len(self.edge_start) == states + 1
            and len(self.edge_target) == edges
            and _within(self.text, END, 2**31 - 2)
            and _within(self.link[1:], 0, states - 1)
            and bool((self.length[self.link[1:]] < self.length[1:]).all())
            and all(_within(ends, -1, len(self.text) - 1) for ends in (self.first, self.last))
            and self.edge_start[0] == 0
            and self.edge_start[-1] == edges
            and bool((np.diff(self.edge_start) >= 0).all())
            and _within(self.edge_target, 0, states - 1)
        )
        if not sound:
            raise ValueError("the corpus arrays contradict each other; build the corpus again")


def _within(array: NDArray[np.int32], low: int, high: int) -> bool:
    return len(array) == 0 or (int(array.min()) >= low and int(array.max()) <= high)


def freeze(automaton: Automaton) -> FrozenArrays:
    count, last = _exact(automaton)
    reached = _reached(automaton)
    number = {state: index for index, state in enumerate(reached)}
    starts, tokens, targets = [0], [], []
    for state in reached:
        # Behind the end of a segment nothing can follow.
        ended = automaton.text[automaton.first[state]] == END if state != ROOT else False
        for token, child in [] if ended else sorted(automaton.edges[state].items()):
            tokens.append(token)
            targets.append(number[child])
        starts.append(len(tokens))
    link = [number.get(automaton.link[state], ROOT) for state in reached]
    columns = (
        automaton.text,
        [automaton.length[state] for state in reached],
        [-1, *link[1:]],
        [automaton.first[state] for state in reached],
        [last[state] for state in reached],
        [count[state] for state in reached],
        starts,
        tokens,
        targets,
    )
    return FrozenArrays(*(np.array(column, dtype=np.int32) for column in columns))


def _exact(automaton: Automaton) -> tuple[list[int], list[int]]:
    """How often, and where last, each state ends: by one pass from long strings to short ones."""
    states = len(automaton.length)
    count, last = [0] * states, [-1] * states
    state = ROOT
    for position, token in enumerate(automaton.text):
        state = automaton.edges[state][token]
        count[state], last[state] = 1, position
    for state in sorted(range(1, states), key=automaton.length.__getitem__, reverse=True):
        parent = automaton.link[state]
        count[parent] += count[state]
        last[parent] = max(last[parent], last[state])
    return count, last


def _reached(automaton: Automaton) -> list[int]:
    """States that a query, or the end of a segment behind it, leads to; in order of creation."""
    seen = {ROOT}
    waiting = [ROOT]
    while waiting:
        for token, child in automaton.edges[waiting.pop()].items():
            if child not in seen:
                seen.add(child)
                if token != END:
                    waiting.append(child)
    return sorted(seen)


class Frozen:
    """Searches checked arrays. Raises ValueError for arrays that contradict each other."""

    def __init__(self, arrays: FrozenArrays, search_bound: int = DEFAULT_BOUND) -> None:
        arrays.check()
        self.search_bound = search_bound
        views = {name: array.data for name, array in arrays.named().items()}
        self.text, self.length, self.link = views["text"], views["length"], views["link"]
        self.first, self.last, self.count = views["first"], views["last"], views["count"]
        self._start, self._token = views["edge_start"], views["edge_token"]
        self._target = views["edge_target"]

    def __len__(self) -> int:
        return len(self.text)

    def check_open(self) -> None:
        """A static corpus doesn't close."""

    def children(self, state: int) -> Iterable[tuple[int, int]]:
        low, high = self._start[state], self._start[state + 1]
        return zip(self._token[low:high], self._target[low:high], strict=True)

    def child(self, state: int, token: int) -> int:
        low, high = self._start[state], self._start[state + 1]
        edge = bisect_left(self._token, token, low, high)
        return self._target[edge] if edge < high and self._token[edge] == token else -1

    def cursor(self) -> StateCursor:
        return StateCursor(self)
