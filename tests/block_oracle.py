"""A parser of whole texts, which the block tracker must agree with: nothing is ever pending."""

from __future__ import annotations

import re
from typing import Any

from dlite.drafters.structure import Mode, Structure


def whole_text_pair(structure: Structure, text: bytes) -> int:
    """The innermost open pair at the end of a text that is known in full: nothing is pending."""
    stack: list[tuple[int, int]] = []
    at, in_string = 0, False
    while at < len(text):
        inner = structure.pairs[stack[-1][0]].inner if stack else structure.top
        top = structure.pairs[stack[-1][0]] if stack else None
        fence = None if in_string else fence_at(structure, inner, stack, text, at)
        found = None if in_string else delimiter_at(structure, inner, top, text, at)
        if fence:
            at, opened = fence
            if opened == "close":
                stack.pop()
            elif opened:
                stack.append(opened)
        elif found:
            size, pair = found
            at += size
            if pair < 0:
                stack.pop()
            else:
                stack.append((pair, 0))
        else:
            byte = text[at : at + 1]
            if top and top.mode is Mode.JSON and not in_string:
                in_string = byte == b'"'
            elif in_string and byte == b"\\":
                at += 1
            elif in_string:
                in_string = byte not in b'"\n'
            at += 1
    return stack[-1][0] if stack else -1


def delimiter_at(
    structure: Structure, inner: tuple[int, ...], top: Any, text: bytes, at: int
) -> tuple[int, int] | None:
    backslashes = len(text[:at]) - len(text[:at].rstrip(b"\\"))
    found = []
    for place, pair in [(p, structure.pairs[p]) for p in inner]:
        if pair.mode is not Mode.FENCE and text.startswith(pair.open, at):
            found.append((len(pair.open), place, pair.mode))
    if top and top.mode is not Mode.FENCE and text.startswith(top.close, at):
        found = [entry for entry in found if entry[0] != len(top.close)]
        found.append((len(top.close), -1, top.mode))
    found = [f for f in found if not (f[2] is Mode.ESCAPE and backslashes % 2)]
    return max(found)[:2] if found else None


def fence_at(
    structure: Structure, inner: tuple[int, ...], stack: list[Any], text: bytes, at: int
) -> tuple[int, Any] | None:
    """Where to go on, and "close", or (pair, run) that opens, or None for a line that's neither."""
    line = re.match(rb"([`~])\1*", text[at:])
    if not line or not re.search(rb"(^|\n) {0,3}\Z", text[:at]):
        return None
    character, run = line[1], len(line[0])
    places = [p for p in inner if structure.pairs[p].mode is Mode.FENCE]
    places = [p for p in places if structure.pairs[p].open[:1] == character]
    if stack and structure.pairs[stack[-1][0]].mode is Mode.FENCE:
        pair, opened = stack[-1]
        if structure.pairs[pair].open[:1] == character and run >= opened:
            tail = re.match(rb"[ \t\r]*(\n|\Z)?", text[at + run :])
            assert tail
            return at + run + tail.end(), "close" if tail[1] is not None else None
    places = [p for p in places if run >= structure.pairs[p].fence_run]
    if not places:
        return None
    info = re.match(rb"[^\n`]*" if character == b"`" else rb"[^\n]*", text[at + run :])
    assert info
    after = at + run + info.end()
    if text[after : after + 1] == b"`":
        return after, None
    fits = [p for p in places if info[0].lstrip().startswith(structure.pairs[p].fence_info)]
    best = max(fits, key=lambda p: len(structure.pairs[p].fence_info), default=None)
    return after + 1, (best, run) if best is not None else None
