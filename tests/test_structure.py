"""What a request may say about blocks, and how quickly anything else is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dlite.drafters.structure import parse_structure

MALFORMED: dict[str, tuple[Any, str]] = {
    "not JSON": ("[[['```', '```']]]", "structure is not JSON"),
    "a megabyte": ("[" + "x" * 2**20, r"structure is 1048577 characters long; give at most 65536"),
    "nested without end": ("[" * 60_000, "structure is not JSON"),
    "an object": ({"a": 1}, "structure is a dict of 1; give a list of groups"),
    "an empty group": ([[]], r"structure\[0\] is a list of 0; give a list of pairs"),
    "a pair of one": ([[["a"]]], r"structure\[0\]\[0\] is a list of 1; give \["),
    "an empty delimiter": ([[["", "b"]]], r"structure\[0\]\[0\].open is ''; give a text"),
    "a blank delimiter": ([[["a", "  "]]], r"structure\[0\]\[0\].close is '  '; give a text"),
    "a number": ([[["a", 5]]], r"\[0\].close is 5; give a text that isn't blank"),
    "a control character": ('[[["a", "<\\tool_call>"]]]', "holds a control character; JSON writes"),
    "half a surrogate": ('[[["a", "\\ud800"]]]', "holds a control character"),
    "a long delimiter": ([[["a" * 65, "b"]]], "open is 65 bytes long; give at most 64"),
    "10,000 pairs": ([[[f"<{i}>", "x"] for i in range(10_000)]], "more than 64 pairs; leave some"),
    "10,000 groups": ([[[f"<{i}>", "x"]] for i in range(10_000)], "more than 64 pairs"),
    "the same open twice": ([[["a", "b"]], [["a", "c"]]], r"\[1\]\[0\] opens with 'a' again; list"),
    "an unknown key": ([[{"open": "a", "close": "b", "end": 1}]], "has 'end'; known are open"),
    "an unknown mode": ([[{"open": "a", "close": "b", "mode": "x"}]], "mode is 'x'; give one of"),
    "a mode that is a list": ([[{"open": "a", "close": "b", "mode": []}]], "mode is a list of 0"),
    "a fence of letters": (
        [[{"open": "abc", "close": "abc", "mode": "fence"}]],
        "'abc'; a fence opens with",
    ),
    "a fence that closes with a tag": ([[["```", "</code>"]]], "'</code>'; a fence closes with"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_structure_is_refused_with_a_reason_and_at_once(name: str) -> None:
    value, message = MALFORMED[name]
    times = []
    for _ in range(3):  # the other processes of a busy machine take their share
        start = time.perf_counter()
        with pytest.raises(ValueError, match=message) as refusal:
            parse_structure(value)
        times.append(time.perf_counter() - start)
        assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)
    assert min(times) < 0.010


def test_blocks_nested_too_deeply_are_refused() -> None:
    groups: list[Any] = [[["x", "y"]]]
    for level in range(8):
        groups = [[{"open": f"<{level}>", "close": "y", "inner": groups}]]
    with pytest.raises(ValueError, match="is nested deeper than 8 blocks; flatten it"):
        parse_structure(groups)


def test_a_backslash_for_a_slash_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a slash was perhaps meant"):
        parse_structure(json.dumps([[["<think>", "<\\think>"]]]))
