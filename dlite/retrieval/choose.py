"""From a matched state of a suffix automaton to the tokens to copy. Shared by the live automaton
and the frozen one; `native/choose.hpp` is its twin, step by step.

The search looks at no more than `bound` edges (so that the work is bounded on any input), in the
order in which the graph lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dlite.retrieval.base import END, GROUP_TOKENS, NOTHING, Continuation, Rule

ROOT = 0
DEFAULT_BOUND = 256  # edges; at match length 1 a state can have hundreds


class Graph(Protocol):
    """States by number: `length` of the longest string, `link` to the longest suffix's state,
    `first` and `last` end position, `count` of end positions."""

    @property
    def text(self) -> Sequence[int]: ...
    @property
    def length(self) -> Sequence[int]: ...
    @property
    def link(self) -> Sequence[int]: ...
    @property
    def first(self) -> Sequence[int]: ...
    @property
    def last(self) -> Sequence[int]: ...
    @property
    def count(self) -> Sequence[int]: ...

    @property
    def search_bound(self) -> int: ...

    def check_open(self) -> None: ...

    def children(self, state: int) -> Iterable[tuple[int, int]]: ...

    def child(self, state: int, token: int) -> int:
        """-1 where there is none."""
        ...


def choose(
    graph: Graph,
    state: int,
    length: int,
    recent_end: int | None,
    rule: int,
    max_tokens: int,
    bound: int,
) -> Continuation:
    """`recent_end`: where the match ended last, if that is not `graph.last[state]`."""
    while state != ROOT and not _goes_on(graph, state):
        state = graph.link[state]
        length, recent_end = graph.length[state], None
    if state == ROOT:
        return NOTHING
    search = _Search(graph, state, bound)
    support = graph.count[state] - search.cut(state)[0]
    agreed = 0
    match rule:
        case Rule.FIRST:
            start = search.oldest() + 1
            count = search.group_count(start)
        case Rule.RECENT:
            start = search.newest(recent_end) + 1
            count = search.group_count(start)
        case Rule.VOTE:
            count, start = search.vote()
        case Rule.MAJORITY:
            count, start, agreed = search.majority(support, max_tokens)
        case _:
            raise ValueError(f"rule is {rule}; give one of {[r.value for r in Rule]}")
    tokens = search.copy(start, max_tokens)
    return Continuation(tokens, length, max(support, count), count, start, agreed)


def _goes_on(graph: Graph, state: int) -> bool:
    return any(token != END for token, _ in graph.children(state))


class _Search:
    def __init__(self, graph: Graph, state: int, bound: int) -> None:
        self.graph, self.state, self.bound, self.budget = graph, state, bound, bound
        self.live_end = len(graph.text) - 1
        self.best_count, self.best_end, self.best_start = 0, -1, -1

    def cut(self, state: int) -> tuple[int, int]:
        """How many occurrences of the state end a segment or the text, and the newest of them."""
        graph = self.graph
        ended = graph.child(state, END)
        count, end = (graph.count[ended], graph.last[ended] - 1) if ended >= 0 else (0, -1)
        return (count + 1, self.live_end) if graph.last[state] == self.live_end else (count, end)

    def oldest(self) -> int:
        end = self.graph.first[self.state]
        if self._followed(end):
            return end
        return min(self.graph.first[child] for _, child in self._look(self.state)) - 1

    def newest(self, recent_end: int | None) -> int:
        end = self.graph.last[self.state] if recent_end is None else recent_end
        if self._followed(end):
            return end
        return max(self.graph.last[child] for _, child in self._look(self.state)) - 1

    def group_count(self, start: int) -> int:
        graph, state = self.graph, self.state
        for token in self.copy(start, GROUP_TOKENS):
            state = graph.child(state, token)
            if state < 0:  # only where the chain cap left a stale end
                return 0
        whole = len(self.copy(start, GROUP_TOKENS)) == GROUP_TOKENS
        return graph.count[state] if whole else self.cut(state)[0]

    def vote(self) -> tuple[int, int]:
        self.budget = self.bound
        self._visit(self.state, 0)
        return self.best_count, self.best_start

    def _visit(self, state: int, depth: int) -> None:
        graph = self.graph
        for token, child in graph.children(state):
            if self.budget == 0:
                return
            self.budget -= 1
            if token == END or graph.count[child] < self.best_count:
                continue
            if depth + 1 == GROUP_TOKENS:
                self._offer(graph.count[child], graph.last[child], GROUP_TOKENS)
            else:
                self._visit(child, depth + 1)
        if depth > 0 and self.budget > 0:
            self._offer(*self.cut(state), depth)

    def _offer(self, count: int, end: int, depth: int) -> None:
        if count > 0 and (count, end - depth) > (self.best_count, self.best_end):
            self.best_count, self.best_end, self.best_start = count, end - depth, end - depth + 1

    def majority(self, support: int, max_tokens: int) -> tuple[int, int, int]:
        graph, state, left, depth, count = self.graph, self.state, support, 0, 0
        while depth < max_tokens:
            leader = (0, -1, -1)
            for _, child in self._look(state):
                leader = max(leader, (graph.count[child], graph.last[child], child))
            if self.budget == 0 or leader[0] == 0 or 2 * leader[0] < left:
                break
            left, _, state = leader
            depth += 1
            if depth <= GROUP_TOKENS:
                count = left
        if depth == 0:
            return *self.vote(), 0
        return count, graph.last[state] - depth + 1, depth

    def _look(self, state: int) -> Iterable[tuple[int, int]]:
        for token, child in self.graph.children(state):
            if self.budget == 0:
                return
            self.budget -= 1
            if token != END:
                yield token, child

    def _followed(self, end: int) -> bool:
        return end < self.live_end and self.graph.text[end + 1] != END

    def copy(self, start: int, max_tokens: int) -> list[int]:
        tokens = list(self.graph.text[start : start + max_tokens]) if start >= 0 else []
        return tokens[: tokens.index(END)] if END in tokens else tokens
