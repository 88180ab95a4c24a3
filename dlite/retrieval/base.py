"""What a retrieval engine offers: the longest suffix of a stream that a corpus has seen, and what
followed it there. Engines know nothing of speculative decoding.

A match counts only where a token follows it. A corpus is a run of segments; nothing matches, and
no continuation runs, across the end of a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

END = -1  # stands behind each segment; no query can hold it
GROUP_TOKENS = 3  # occurrences are grouped by their next three tokens (AgSpec)


class Rule(IntEnum):
    """Which of the match's occurrences is copied."""

    FIRST = 0  # the oldest
    RECENT = 1  # the newest
    VOTE = 2  # the newest of the most frequent group of next three tokens (AgSpec)
    MAJORITY = 3  # while at least half of those left agree, theirs (AgentSpec); then as VOTE


class Continuation(NamedTuple):
    """Tokens that followed the longest match.

    `votes` of its `support` occurrences go on with `tokens[:3]` (MAJORITY: with the agreed tokens
    among those three). `agreed` is the length of the majority prefix (MAJORITY only). `start` is
    the corpus position of `tokens[0]`, -1 where the engine doesn't say. Larger is more recent.
    """

    tokens: list[int]
    match_length: int
    support: int
    votes: int
    start: int
    agreed: int


NOTHING = Continuation([], 0, 0, 0, -1, 0)


class Source(Protocol):
    """Follows one stream of tokens through one corpus."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Raises ValueError for an id outside 0 .. 2**31 - 2, before anything is taken."""
        ...

    def find(self, rule: int, max_tokens: int) -> Continuation: ...


class Cursor(Source, Protocol):
    """A stream that is no part of the corpus it looks into."""

    def reset(self) -> None:
        """Forgets the stream."""
        ...


class Index(Source, Protocol):
    """A corpus that is at the same time the stream: `find` looks for its own last tokens."""

    def end_segment(self) -> None: ...

    def cursor(self) -> Cursor: ...

    def __len__(self) -> int:
        """Positions so far; the end of a segment takes one."""
        ...

    def used_bytes(self) -> int: ...

    def allocated_bytes(self) -> int: ...

    def close(self) -> None:
        """Frees the corpus, wiped where the engine is native; every later use raises ValueError."""
        ...


def checked(tokens: Iterable[int]) -> list[int]:
    ids = tokens if isinstance(tokens, list) else [int(token) for token in tokens]
    if ids and not (min(ids) >= 0 and max(ids) < 2**31 - 1):
        wrong = next(token for token in ids if not 0 <= token < 2**31 - 1)
        raise ValueError(f"token id {wrong} can't be indexed; give ids in 0 .. {2**31 - 2}")
    return ids


def step(
    sources: Sequence[Source], tokens: Sequence[Iterable[int]], rule: int, max_tokens: int
) -> list[Continuation]:
    """Extends source i by `tokens[i]`, then finds in it; the native one does so in one call."""
    for source, new in zip(sources, tokens, strict=True):
        source.extend(new)
    return [source.find(rule, max_tokens) for source in sources]
