"""Which blocks an agent's output consists of, as a request says it.

`structure` is JSON: a list of groups, a group a list of pairs `[open, close]`, or of objects
`{"open", "close", "mode", "inner"}`. A group is one kind of block; its number (from 1 on, in order
of appearance) is the label that its text gets. Text outside of all blocks has label 0.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAX_JSON_BYTES = 65_536
MAX_PAIRS = 64
MAX_DELIMITER_BYTES = 64
MAX_DEPTH = 8
TEXT = 0


class Mode(IntEnum):
    """How a block's content is read while its end is looked for."""

    RAW = 0  # the close delimiter, wherever it stands
    JSON = 1  # not inside of a string
    FENCE = 2  # Markdown's: at the start of a line, alone on it, as long as the opening run
    ESCAPE = 3  # not behind an odd run of backslashes; neither is the open delimiter


@dataclass(frozen=True, slots=True)
class Pair:
    open: bytes
    close: bytes
    mode: Mode
    group: int
    inner: tuple[int, ...]  # pairs that open inside, by their place in Structure.pairs

    @property
    def fence_run(self) -> int:
        """Of a FENCE: how many of its character open it at least."""
        return len(self.open) - len(self.open.lstrip(self.open[:1]))

    @property
    def fence_info(self) -> bytes:
        return self.open[self.fence_run :]


@dataclass(frozen=True, slots=True)
class Structure:
    pairs: tuple[Pair, ...]
    top: tuple[int, ...]  # pairs that open outside of all blocks

    def mentions(self, data: bytes) -> bool:
        return any(data in pair.open or data in pair.close for pair in self.pairs)


def parse_structure(value: str | list[Any]) -> Structure:
    """Raises ValueError, which says where and why, for anything but well-formed structure."""
    if isinstance(value, str):
        if len(value) > MAX_JSON_BYTES:
            raise ValueError(
                f"structure is {len(value)} characters long; give at most {MAX_JSON_BYTES}"
            )
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structure is not JSON ({error}); give a list of groups of "
                '["open", "close"] pairs in double quotes'
            ) from None
    pairs: list[Pair] = []
    top = _groups(value, "structure", pairs, itertools.count(TEXT + 1), 1)
    return Structure(tuple(pairs), top)


def _groups(
    value: Any, where: str, pairs: list[Pair], labels: Iterator[int], depth: int
) -> tuple[int, ...]:
    """Appends to `pairs`, and returns the places of those of this level."""
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_shown(value)}; give a list of groups")
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} blocks; flatten it")
    places: list[int] = []
    for number, group in enumerate(value):
        if not isinstance(group, list) or not group:
            raise ValueError(f"{where}[{number}] is {_shown(group)}; give a list of pairs")
        label = next(labels)
        for index, entry in enumerate(group):
            at = f"{where}[{number}][{index}]"
            if len(pairs) == MAX_PAIRS:
                raise ValueError(f"structure has more than {MAX_PAIRS} pairs; leave some out")
            place = len(pairs)
            opened, closed, mode, inner = _entry(entry, at)
            pairs.append(Pair(opened, closed, mode, label, ()))
            inside = _groups(inner, f"{at}.inner", pairs, labels, depth + 1)
            pairs[place] = Pair(opened, closed, mode, label, inside)
            if any(pairs[other].open == opened for other in places):
                raise ValueError(f"{at} opens with {opened.decode()!r} again; list it once")
            places.append(place)
    return tuple(places)


def _entry(entry: Any, at: str) -> tuple[bytes, bytes, Mode, Any]:
    if isinstance(entry, list) and len(entry) == 2:
        entry = {"open": entry[0], "close": entry[1]}
    if not isinstance(entry, dict) or not {"open", "close"} <= entry.keys():
        raise ValueError(f'{at} is {_shown(entry)}; give ["open", "close"]')
    unknown = sorted(entry.keys() - {"open", "close", "mode", "inner"})
    if unknown:
        raise ValueError(f"{at} has {_shown(unknown[0])}; known are open, close, mode, inner")
    opened = _delimiter(entry["open"], f"{at}.open")
    closed = _delimiter(entry["close"], f"{at}.close")
    if b"\\" in closed and closed.replace(b"\\", b"", 1) == opened:
        warnings.warn(f"{at}.close is {closed!r}: a slash was perhaps meant", stacklevel=2)
    mode = _mode(entry.get("mode"), opened, at)
    if mode is Mode.FENCE:
        _check_fence(opened, closed, at)
    return opened, closed, mode, entry.get("inner", [])


def _delimiter(value: Any, at: str) -> bytes:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{at} is {_shown(value)}; give a text that isn't blank")
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in value):
        raise ValueError(
            f"{at} is {_shown(value)}, which holds a control character; JSON writes a backslash "
            "as two"
        )
    data = value.encode()
    if len(data) > MAX_DELIMITER_BYTES:
        raise ValueError(f"{at} is {len(data)} bytes long; give at most {MAX_DELIMITER_BYTES}")
    return data


def _mode(value: Any, opened: bytes, at: str) -> Mode:
    if value is None:
        if opened.startswith((b"```", b"~~~")):
            return Mode.FENCE
        if opened in {b"$", b"$$"}:
            return Mode.ESCAPE
        return Mode.JSON if re.fullmatch(rb"<\W?tool_call\W?>", opened) else Mode.RAW
    modes = {mode.name.lower(): mode for mode in Mode}
    if not isinstance(value, str) or value not in modes:
        raise ValueError(f"{at}.mode is {_shown(value)}; give one of {', '.join(modes)}")
    return modes[value]


def _check_fence(opened: bytes, closed: bytes, at: str) -> None:
    character = opened[:1]
    if not (character in {b"`", b"~"} and opened.startswith(character * 3)):
        raise ValueError(f"{at}.open is {opened.decode()!r}; a fence opens with ``` or ~~~")
    if closed.strip(character) or len(closed) < 3:
        raise ValueError(
            f"{at}.close is {closed.decode()!r}; a fence closes with {(character * 3).decode()}"
        )


def _shown(value: Any) -> str:
    """For a message of one line, however long the value."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, str) else repr(value[:40])
    return text if len(text) <= 60 else text[:57] + "..."
