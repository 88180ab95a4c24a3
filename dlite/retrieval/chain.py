"""Hash chains as in LZ77, in pure Python: the twin of `native/chain.hpp`.

Positions whose last `min_match` tokens agree are linked from new to old. A search compares at most
`candidates` of them backwards over at most `max_match` tokens and keeps the longest. It is cheap
to build and to throw away; against the automaton it loses matches shorter than `min_match` and
whatever lies behind the newest candidates.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from dlite.retrieval.base import END, GROUP_TOKENS, NOTHING, Continuation, Rule, checked

MIN_MATCH, MAX_MATCH, CANDIDATES = 3, 64, 64


class HashChain:
    """Index over a growing text. Raises ValueError for a bad limit."""

    def __init__(
        self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, candidates: int = CANDIDATES
    ) -> None:
        if not 1 <= min_match <= 8:
            raise ValueError(f"min_match is {min_match}; give an integer in 1 .. 8")
        if not min_match <= max_match <= 1024:
            raise ValueError(f"max_match is {max_match}; give an integer in {min_match} .. 1024")
        if not 1 <= candidates <= 1024:
            raise ValueError(f"candidates is {candidates}; give an integer in 1 .. 1024")
        self.min_match, self.max_match, self.candidates = min_match, max_match, candidates
        self.text: list[int] = []
        self._earlier: list[int] = []  # position -> the one before it with the same last tokens
        self._newest: dict[tuple[int, ...], int] = {}
        self._segment_start = 0
        self._closed = False

    def __len__(self) -> int:
        self.check_open()
        return len(self.text)

    def extend(self, tokens: Iterable[int]) -> None:
        self.check_open()
        text, earlier, newest, width = self.text, self._earlier, self._newest, self.min_match
        first = self._segment_start + width - 1
        for token in checked(tokens):
            text.append(token)
            position = len(text) - 1
            if position < first:
                earlier.append(-1)
            else:
                gram = tuple(text[-width:])
                earlier.append(newest.get(gram, -1))
                newest[gram] = position

    def end_segment(self) -> None:
        self.check_open()
        self.text.append(END)
        self._earlier.append(-1)
        self._segment_start = len(self.text)

    def find(self, rule: int, max_tokens: int) -> Continuation:
        self.check_open()
        stream = self.text[max(self._segment_start, len(self.text) - self.max_match) :]
        newest = self._earlier[-1] if stream else -1
        return self._find(stream, newest, rule, max_tokens)

    def find_for(self, stream: list[int], rule: int, max_tokens: int) -> Continuation:
        """For a stream that isn't in the text; its last `max_match` tokens are enough."""
        self.check_open()
        newest = self._newest.get(tuple(stream[-self.min_match :]), -1)
        return self._find(stream, newest, rule, max_tokens)

    def _find(self, stream: list[int], newest: int, rule: int, max_tokens: int) -> Continuation:
        longest, ends, left = 0, [], self.candidates
        end = newest
        while end >= 0 and left:
            left -= 1
            if end + 1 < len(self.text) and self.text[end + 1] != END:
                length = self._common(stream, end)
                if length > longest:
                    longest, ends = length, []
                if length == longest:
                    ends.append(end)
            end = self._earlier[end]
        if not ends:
            return NOTHING
        count, start, agreed = select(self.text, ends, rule, max_tokens)
        tokens = following(self.text, start, max_tokens)
        return Continuation(tokens, longest, len(ends), count, start, agreed)

    def _common(self, stream: list[int], end: int) -> int:
        """Tokens that the stream's tail and the text up to `end` have in common."""
        text, length = self.text, 0
        limit = min(len(stream), end + 1)
        while length < limit and text[end - length] == stream[-1 - length]:
            length += 1
        return length

    def cursor(self) -> ChainCursor:
        self.check_open()
        return ChainCursor(self)

    def used_bytes(self) -> int:
        """Of the lists and the dictionary; the numbers in them are Python's."""
        self.check_open()
        return sum(map(sys.getsizeof, (self.text, self._earlier, self._newest)))

    def allocated_bytes(self) -> int:
        return self.used_bytes()

    def close(self) -> None:
        """Drops the text. Python can't wipe its numbers: the native index does."""
        self.__init__()
        self._closed = True

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("this index is closed; open a new one")


class ChainCursor:
    """Follows a stream that is no part of the text."""

    def __init__(self, chain: HashChain) -> None:
        self.chain = chain
        self.reset()

    def reset(self) -> None:
        self._stream: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        self.chain.check_open()
        self._stream = (self._stream + checked(tokens))[-self.chain.max_match :]

    def find(self, rule: int, max_tokens: int) -> Continuation:
        return self.chain.find_for(self._stream, rule, max_tokens)


def following(text: Sequence[int], start: int, max_tokens: int) -> list[int]:
    tokens = list(text[start : start + max_tokens])
    return tokens[: tokens.index(END)] if END in tokens else tokens


def select(
    text: Sequence[int], ends: list[int], rule: int, max_tokens: int
) -> tuple[int, int, int]:
    """Count, start and agreed prefix (see Continuation) of what `rule` picks among the ends of
    the match, which are given from new to old."""
    groups = {end: tuple(following(text, end + 1, GROUP_TOKENS)) for end in ends}
    sizes = Counter(groups.values())
    match rule:
        case Rule.FIRST:
            end = ends[-1]
        case Rule.RECENT:
            end = ends[0]
        case Rule.VOTE:
            end = max(ends, key=lambda end: (sizes[groups[end]], end))
        case Rule.MAJORITY:
            return _majority(text, ends, max_tokens)
        case _:
            raise ValueError(f"rule is {rule}; give one of {[r.value for r in Rule]}")
    return sizes[groups[end]], end + 1, 0


def _majority(text: Sequence[int], ends: list[int], max_tokens: int) -> tuple[int, int, int]:
    left, depth, count = ends, 0, 0
    while depth < max_tokens:
        branches: dict[int, list[int]] = {}
        for end in left:
            for token in following(text, end + 1 + depth, 1):
                branches.setdefault(token, []).append(end)
        leader = max(branches.values(), key=lambda branch: (len(branch), branch[0]), default=[])
        if not leader or 2 * len(leader) < len(left):
            break
        left, depth = leader, depth + 1
        if depth <= GROUP_TOKENS:
            count = len(left)
    if depth == 0:
        return select(text, ends, Rule.VOTE, max_tokens)
    return count, left[0] + 1, depth
