"""Brute force over strings: what every retrieval engine must agree with.

Nothing here is clever: a string's occurrences are found by looking everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dlite.retrieval.base import END, NOTHING, Continuation, Rule


def tokens_of(num_symbols: int, data: bytes) -> list[int]:
    return [END if byte > 249 else byte % num_symbols for byte in data]


def grow(indexes: list[Any], token: int) -> None:
    for index in indexes:
        index.end_segment() if token == END else index.extend([token])


def growth(indexes: list[Any], text: list[int]) -> Iterator[tuple[list[int], Rule]]:
    """The text so far after each token, and a rule to try."""
    for size, token in enumerate(text, start=1):
        grow(indexes, token)
        yield text[:size], Rule((size + token) % 4)


def segment_of(text: list[int]) -> list[int]:
    return text[len(text) - text[::-1].index(END) :] if END in text else text


def after(text: list[int], end: int, limit: int) -> list[int]:
    """At most `limit` tokens behind position `end`, up to the end of its segment."""
    tokens = []
    for token in text[end + 1 : end + 1 + limit]:
        if token == END:
            break
        tokens.append(token)
    return tokens


def ends_of(text: list[int], string: list[int]) -> list[int]:
    """Where `string` ends in `text` with a token behind it."""
    size = len(string)
    ends = range(size - 1, len(text))
    return [e for e in ends if text[e - size + 1 : e + 1] == string and after(text, e, 1)]


def longest_match(text: list[int], stream: list[int]) -> tuple[int, list[int]]:
    for size in range(len(stream), 0, -1):
        ends = ends_of(text, stream[-size:])
        if ends:
            return size, ends
    return 0, []


def match_among_newest(
    text: list[int], stream: list[int], own: bool, limits: tuple[int, int, int]
) -> tuple[int, list[int]]:
    """The hash chain's: among the newest ends of the stream's last `min_match` tokens. The text's
    last position is no candidate where the stream is the text's `own` tail."""
    min_match, max_match, candidates = limits
    if len(stream) < min_match:
        return 0, []
    size, gram = min_match, stream[-min_match:]
    places = range(size - 1, len(text) - own)
    ends = [e for e in places if text[e - size + 1 : e + 1] == gram]
    ends = [e for e in ends[-candidates:] if after(text, e, 1)]
    for size in range(min(max_match, len(stream)), min_match - 1, -1):
        kept = [e for e in ends if e >= size - 1 and text[e - size + 1 : e + 1] == stream[-size:]]
        if kept:
            return size, kept
    return 0, []


def continuation(
    text: list[int], match: tuple[int, list[int]], rule: Rule, max_tokens: int
) -> Continuation:
    length, ends = match
    if not ends:
        return NOTHING
    groups = {e: tuple(after(text, e, 3)) for e in ends}
    sizes = Counter(groups.values())
    agreed = 0
    if rule is Rule.FIRST:
        end = min(ends)
    elif rule is Rule.RECENT:
        end = max(ends)
    else:
        end = max(ends, key=lambda e: (sizes[groups[e]], e))
    count = sizes[groups[end]]
    if rule is Rule.MAJORITY:
        left = ends
        while agreed < max_tokens:
            following = {e: after(text, e + agreed, 1) for e in left}
            branches = Counter(token for tokens in following.values() for token in tokens)
            newest = {t: max(e for e in left if following[e] == [t]) for t in branches}
            leader = max(branches, key=lambda t: (branches[t], newest[t]), default=END)
            if 2 * branches[leader] < len(left) or leader == END:
                break
            left = [e for e in left if following[e] == [leader]]
            agreed += 1
            count = len(left) if agreed <= 3 else count
        end = max(left) if agreed else end
    tokens = after(text, end, max_tokens)
    return Continuation(tokens, length, len(ends), count, end + 1, agreed)


class Follower:
    """What a cursor may match: as each token came, the longest suffix that occurred by then."""

    def __init__(self) -> None:
        self.stream: list[int] = []
        self.length = 0

    def extend(self, text: list[int], token: int) -> None:
        self.stream.append(token)
        size = self.length + 1
        while size and not any(
            text[i : i + size] == self.stream[-size:] for i in range(len(text) - size + 1)
        ):
            size -= 1
        self.length = size

    def matched(self) -> list[int]:
        return self.stream[len(self.stream) - self.length :]


class CappedStrings:
    """The suffix automaton's counts and ends when its chain cap cuts updates, per string.

    Strings that end at the same positions form a class, and the cap counts classes, from the whole
    text to its last token. A `Graph` of dlite.retrieval.choose whose states are all strings.
    """

    def __init__(self, chain_cap: int, search_bound: int, sort_children: bool = False) -> None:
        self.chain_cap, self.search_bound = chain_cap, search_bound
        self.sort_children = sort_children
        self.text: list[int] = []
        self.number: dict[tuple[int, ...], int] = {(): 0}
        self.strings: list[tuple[int, ...]] = [()]
        self.count, self.last, self.first, self.link, self.length = [0], [-1], [-1], [-1], [0]
        self.earlier: dict[int, int] = {}

    def check_open(self) -> None: ...

    def append(self, token: int) -> None:
        self.earlier = dict(enumerate(self.last))
        self.text.append(token)
        position = len(self.text) - 1
        suffixes = [tuple(self.text[start:]) for start in range(len(self.text))]
        for suffix in reversed(suffixes):
            if suffix not in self.number:
                self.number[suffix] = len(self.strings)
                self.strings.append(suffix)
                self.count.append(0)
                self.last.append(-1)
                self.first.append(position)
                self.length.append(len(suffix))
                self.link.append(self.number[suffix[1:]])
        classes: list[list[int]] = []
        for suffix in suffixes:
            ends = self._all_ends(suffix)
            if ends not in classes:
                classes.append(ends)
            if len(classes) <= self.chain_cap:
                self.count[self.number[suffix]] += 1
                self.last[self.number[suffix]] = position

    def _all_ends(self, string: tuple[int, ...]) -> list[int]:
        size, text = len(string), self.text
        return [e for e in range(len(text)) if tuple(text[max(0, e - size + 1) : e + 1]) == string]

    def children(self, state: int) -> Iterable[tuple[int, int]]:
        string = self.strings[state]
        found = dict.fromkeys(
            self.text[e + 1] for e in self._all_ends(string) if e + 1 < len(self.text)
        )
        tokens = sorted(found) if self.sort_children else list(found)
        return [(token, self.number[(*string, token)]) for token in tokens]

    def child(self, state: int, token: int) -> int:
        return self.number.get((*self.strings[state], token), -1)

    def state_of(self, stream: list[int]) -> int:
        """The longest suffix of `stream` that occurs before the text's present end."""
        for start in range(len(stream)):
            string = tuple(stream[start:])
            if self._all_ends(string)[:1] not in ([], [len(self.text) - 1]):
                return self.number[string]
        return 0
