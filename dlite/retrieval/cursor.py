"""A stream followed through a suffix automaton that it is no part of."""

from __future__ import annotations

from collections.abc import Iterable

from dlite.retrieval.base import NOTHING, Continuation, checked
from dlite.retrieval.choose import ROOT, Graph, choose


class StateCursor:
    """State and length of the longest suffix of the stream that occurs in `graph`.

    The graph may grow between two calls.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reset()

    def reset(self) -> None:
        self._state, self._length = ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        graph = self.graph
        graph.check_open()
        self._repair()
        state, length = self._state, self._length
        for token in checked(tokens):
            target = graph.child(state, token)
            while target < 0 and state != ROOT:
                state = graph.link[state]
                length = graph.length[state]
                target = graph.child(state, token)
            state, length = (target, length + 1) if target >= 0 else (ROOT, 0)
        self._state, self._length = state, length

    def find(self, rule: int, max_tokens: int) -> Continuation:
        graph = self.graph
        graph.check_open()
        self._repair()
        if self._state == ROOT:
            return NOTHING
        bound = graph.search_bound
        return choose(graph, self._state, self._length, None, rule, max_tokens, bound)

    def _repair(self) -> None:
        """A clone made since the last call may have taken over the matched string."""
        graph, state = self.graph, self._state
        while state != ROOT and graph.length[graph.link[state]] >= self._length:
            state = graph.link[state]
        self._state = state
