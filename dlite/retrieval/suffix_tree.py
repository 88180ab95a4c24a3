"""The suffix tree of Snowflake's `arctic-inference`, where that is installed: a baseline.

It picks continuations by its own rule (the path of the most frequent children, the match length
with the highest summed probability), so `find` ignores the rule it is given, and knows neither
support nor place. Its own last tokens are counted like earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dlite.retrieval.base import Continuation, checked

MAX_DEPTH = 64
INSTALL = "pip install --no-build-isolation --no-deps arctic-inference"


@dataclass(frozen=True, slots=True)
class Speculation:
    """`score` is the sum of `probs`, the tree's estimates that each token follows."""

    tokens: list[int]
    probs: list[float]
    score: float
    match_length: int


class SuffixTree:
    """`own_length`: `find` stops where the package's own rule would. Raises ValueError where the
    package isn't installed."""

    def __init__(self, max_depth: int = MAX_DEPTH, *, own_length: bool = False) -> None:
        self.max_depth, self.own_length = max_depth, own_length
        self._tree: Any = _native_tree(max_depth)
        self._stream: list[int] = []
        self._segment, self._size = 0, 0

    def __len__(self) -> int:
        self.check_open()
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        self.check_open()
        ids = checked(tokens)
        self._tree.extend(self._segment, ids)
        self._stream = (self._stream + ids)[-self.max_depth :]
        self._size += len(ids)

    def end_segment(self) -> None:
        self.check_open()
        self._stream = []
        self._segment += 1
        self._size += 1

    def find(self, rule: int, max_tokens: int) -> Continuation:
        return self.find_for(self._stream, max_tokens)

    def find_for(self, stream: list[int], max_tokens: int) -> Continuation:
        whole = {} if self.own_length else {"factor": max_tokens, "min_prob": 0.0}
        found = self.speculate(stream, max_tokens, **whole)
        return Continuation(found.tokens, found.match_length, 0, 0, -1, 0)

    def speculate(
        self,
        stream: list[int] | None = None,
        max_tokens: int = MAX_DEPTH,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
    ) -> Speculation:
        """At most `factor * match length + offset` tokens, down to probability `min_prob`; with
        its defaults the rule of the package. `stream`: None is the tree's own."""
        self.check_open()
        context = self._stream if stream is None else stream[-self.max_depth :]
        if not context or max_tokens < 1:
            return Speculation([], [], 0.0, 0)
        found = self._tree.speculate(context, max_tokens, factor, offset, min_prob, False)
        return Speculation(found.token_ids, found.probs, found.score, found.match_len)

    def cursor(self) -> TreeCursor:
        self.check_open()
        return TreeCursor(self)

    def used_bytes(self) -> int:
        self.check_open()
        return self._tree.estimate_memory()

    def allocated_bytes(self) -> int:
        return self.used_bytes()

    def close(self) -> None:
        """Frees the tree; it is not wiped."""
        self._tree, self._stream = None, []

    def check_open(self) -> None:
        if self._tree is None:
            raise ValueError("this index is closed; open a new one")


class TreeCursor:
    """Follows a stream that is no part of the tree."""

    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree
        self.reset()

    def reset(self) -> None:
        self._stream: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        self.tree.check_open()
        self._stream = (self._stream + checked(tokens))[-self.tree.max_depth :]

    def find(self, rule: int, max_tokens: int) -> Continuation:
        return self.tree.find_for(self._stream, max_tokens)


def _native_tree(max_depth: int) -> Any:
    try:
        from arctic_inference.suffix_decoding._C import SuffixTree as Tree  # pyright: ignore
    except ImportError:
        raise ValueError(f"the suffix tree needs arctic-inference; {INSTALL}") from None
    return Tree(max_depth)
