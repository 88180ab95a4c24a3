"""The block tracker, native and in Python: the cases that its rules decide, every way to split a
stream, and a parser of whole texts that waits for nothing."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dlite.drafters.block_tracker import BlockTracker, make_tracker
from dlite.drafters.structure import Structure, parse_structure
from dlite.tokens import TokenBytes, TokenKind, token_bytes
from tests.block_oracle import whole_text_pair

if TYPE_CHECKING:
    from dlite.target import TargetModel

QWEN3 = Path(__file__).parents[2] / "shared/data/tokenizer_qwen3/tokenizer.json"
TRACKERS: list[Callable[[Structure, TokenBytes], Any]] = [BlockTracker]
if importlib.util.find_spec("dlite.retrieval._native"):
    from dlite.retrieval import _native

    TRACKERS.append(_native.BlockTracker)
each_tracker = pytest.mark.parametrize("make", TRACKERS, ids=lambda t: t.__module__)

KINDS = ["text", "tool_call", "think", "code", "display", "inline", "brackets", "parens"]
KINDS += ["action", "observation"]
AGENT = parse_structure(
    json.dumps(
        [
            [["<tool_call>", "</tool_call>"]],
            [["<think>", "</think>"]],
            [["```", "```"]],
            [["$$", "$$"]],
            [["$", "$"]],
            [["\\[", "\\]"]],
            [["\\(", "\\)"]],
            [
                {
                    "open": "<action>",
                    "close": "</action>",
                    "inner": [[["<observation>", "</observation>"]]],
                }
            ],
        ]
    )
)
CASES: dict[str, tuple[list[str | bytes], str]] = {
    "delimiter over two tokens": (["a<tool", "_call>x"], "tool_call"),
    "close over two tokens": (["<tool_call>{}</tool_", "call>"], "text"),
    "close merged with text": (["<think>x", "</think>\n\nHi"], "text"),
    "stray close before an open": (["</think><tool_call>"], "tool_call"),
    "almost a delimiter": (["<tool_", "cal>x"], "text"),
    "restart inside a partial one": (["<tool_", "<tool_call>x"], "tool_call"),
    "close inside a JSON string": (['<tool_call>{"a":"use </tool_call> here'], "tool_call"),
    "close behind that string": (['<tool_call>{"a":"</tool_call> x', '"}\n</tool_call>'], "text"),
    "escaped quote in a JSON string": (['<tool_call>{"a":"q\\"</tool_call>'], "tool_call"),
    "escaped backslash before a quote": (['<tool_call>{"a":"q\\\\"}</tool_call>'], "text"),
    "line end in a JSON string": (['<tool_call>{"a":"x\n</tool_call>'], "text"),
    "another block in a raw one": (["<think>maybe <tool_call>x"], "think"),
    "inner block": (["<action><observation>y"], "observation"),
    "inner block closed": (["<action><observation>y", "</observation>"], "action"),
    "inner block alone": (["<observation>y"], "text"),
    "outer close inside an inner block": (["<action><observation></action>"], "observation"),
    "fence": (["```python\n", "x"], "code"),
    "fence closed": (["```python\nx\n", "```"], "text"),
    "fence closed, next line": (["```python\nx\n", "```  \n", "y"], "text"),
    "text behind a closing fence": (["```python\nx\n", "```", "y"], "code"),
    "fence that isn't at the line's start": (["use ``` like so"], "text"),
    "fence with an info string that isn't one": (["``` a`b\n", "x"], "text"),
    "shorter fence in a longer one": (["````md\n```\na\n```\n"], "code"),
    "longer fence closed": (["````md\n```\na\n```\n````"], "text"),
    "fence behind three spaces": (["  \n   ```\nx"], "code"),
    "fence behind four spaces": (["    ```\nx"], "text"),
    "indented close of a fence": (["```\nx\n   ```\ny"], "text"),
    "close indented by four": (["```\nx\n    ```\ny"], "code"),
    "longer run closes": (["```\nx\n`````\ny"], "text"),
    "display maths, not inline twice": (["$$x"], "display"),
    "display maths over two tokens": (["$", "$x"], "display"),
    "inline maths": (["$x"], "inline"),
    "inline maths closed": (["$x$ y"], "text"),
    "escaped dollar": (["price \\$5"], "text"),
    "escaped backslash before a dollar": (["\\\\$5"], "inline"),
    "escaped dollar in maths": (["$a\\$b"], "inline"),
    "undecided dollar": (["$"], "inline"),
    "brackets, though a backslash": (["\\[x"], "brackets"),
    "brackets closed": (["\\[x\\]"], "text"),
    "parentheses": (["\\(x\\) \\(y"], "parens"),
    "emoji over two tokens": ([b"\xf0\x9f", b"\x99\x82<think>"], "think"),
    "partial delimiter at the end": (["x<tool_call"], "text"),
    "typed special token": (["<think>", "<|im_end|>"], "think"),
}


def spelled(*parts: bytes) -> tuple[TokenBytes, list[int]]:
    """A table whose token i is part i."""
    entries = {i: (part, TokenKind.TEXT) for i, part in enumerate(parts)}
    return TokenBytes.of(entries, len(parts)), list(range(len(parts)))


def as_bytes(part: str | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.encode()


@each_tracker
@pytest.mark.parametrize("name", CASES)
def test_the_block_is(make: Callable[..., Any], name: str) -> None:
    parts, expected = CASES[name]
    table, tokens = spelled(*map(as_bytes, parts))
    tracker = make(AGENT, table)
    tracker.feed(tokens)
    assert KINDS[tracker.block] == expected


@pytest.fixture(scope="module", params=["SmolLM2", "Qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "SmolLM2":
        target: TargetModel = request.getfixturevalue("smollm2")
        return target.tokenizer.backend_tokenizer
    if not QWEN3.is_file():
        pytest.skip("needs ../shared/data/tokenizer_qwen3")
    return Tokenizer.from_file(str(QWEN3))


@pytest.mark.slow
@each_tracker
def test_every_case_holds_with_a_real_tokenizer(make: Callable[..., Any], tokenizer: Any) -> None:
    """SmolLM2 splits </tool_call> and merges its end with a quote, for Qwen3 it is one id."""
    table = token_bytes(tokenizer)
    for name, (parts, expected) in CASES.items():
        text = b"".join(map(as_bytes, parts)).decode()
        if name == "typed special token":
            continue  # a tokenizer that encodes text makes the special token of it
        tracker = make(AGENT, table)
        tracker.feed(tokenizer.encode(text, add_special_tokens=False).ids)
        assert KINDS[tracker.block] == expected, name
    tracker = make(AGENT, table)
    tracker.feed(tokenizer.encode("<think>a", add_special_tokens=False).ids)
    end = tokenizer.token_to_id("<|im_end|>")
    typed = [tokenizer.encode(c, add_special_tokens=False).ids for c in "<|im_end|>"]
    tracker.feed([token for tokens in typed for token in tokens])
    assert KINDS[tracker.block] == "think"
    assert [KINDS[label] for label in tracker.feed([end])] == ["think"]
    assert KINDS[tracker.block] == "text"


TAGS = [f"<{slash}{name}>" for name in ("tool_call", "think", "action") for slash in ("", "/")]
PIECES = [*TAGS, "<observation>", "</observation>", "```", "````", "`", "~~~", "$", "$$", "\\"]
PIECES += ["\\[", "\\]", "\\(", "\\)", "a", "{", "}", "python", '"', "<", ">", "/"]
PIECES += ["\n", " ", "   ", "\t"]
NESTED = parse_structure(
    [
        [["```python", "```"], ["`", "`"], ["~~~", "~~~"]],
        [{"open": "<tool_call>", "close": "</tool_call>", "inner": [[["```", "```"], ["$", "$"]]]}],
        [["$", "$"], ["$$", "$$"], ["<think>", "</think>"], ["<", ">"]],
        [{"open": "````", "close": "```", "inner": [[["$", "$"]]]}],
        [{"open": "{", "close": "}", "mode": "escape"}],
    ]
)
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
structures = st.sampled_from([AGENT, NESTED])


@settings(max_examples=1000, deadline=None)
@given(structures, texts, st.data())
def test_the_block_depends_on_the_bytes_and_not_on_the_tokens(
    structure: Structure, text: str, data: st.DataObject
) -> None:
    stream = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)) | {0, len(stream)})
    parts = [stream[a:b] for a, b in itertools.pairwise(cuts)]
    table, tokens = spelled(*parts)
    expected = [whole_text_pair(structure, stream[:end]) for end in cuts]
    labels = [structure.pairs[p].group if p >= 0 else 0 for p in expected]
    for make in TRACKERS:
        tracker = make(structure, table)
        assert tracker.feed(tokens) == labels[:-1]
        assert tracker.pair == expected[-1]


def splits(tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    for size in range(len(tokens) + 1):
        yield tokens[:size], tokens[size:]


@each_tracker
def test_a_draft_is_cut_behind_the_delimiter_that_ends_its_block(make: Callable[..., Any]) -> None:
    table, tokens = spelled(b"<think>", b"a", b"b</", b"think>", b"\n", b"<tool", b"_call>", b"{")
    tracker = make(AGENT, table)
    kept = []
    for past, draft in splits(tokens):
        tracker.reset()
        tracker.feed(past)
        kept.append(tracker.cut(draft))
    assert kept == [1, 3, 2, 1, 3, 2, 1, 1, 0]


@each_tracker
def test_a_copy_looks_ahead_and_leaves_the_tracker_where_it_was(make: Callable[..., Any]) -> None:
    table, _ = spelled(b"<th", b"ink>", b"</think>")
    tracker = make(AGENT, table)
    tracker.feed([0])
    ahead = tracker.copy()
    ahead.feed([1])
    assert (KINDS[ahead.block], KINDS[tracker.block]) == ("think", "text")
    tracker.feed([1])
    assert KINDS[tracker.block] == "think"


@each_tracker
def test_a_hole_in_the_vocabulary_and_an_unknown_id_end_every_block(
    make: Callable[..., Any],
) -> None:
    table = TokenBytes.of({0: (b"<think>", TokenKind.ADDED), 2: (b"", TokenKind.UNDECODABLE)}, 3)
    for token in (1, 2, 3, -1, 10**9):
        tracker = make(AGENT, table)
        assert [KINDS[label] for label in tracker.feed([0, 0, token])] == ["text", "think", "think"]
        assert KINDS[tracker.block] == "text"


@each_tracker
def test_special_tokens_that_a_delimiter_names_are_text(make: Callable[..., Any]) -> None:
    """Harmony's channels are marked by special tokens, which would else end every block."""
    structure = parse_structure([[["<|channel|>analysis<|message|>", "<|end|>"]]])
    marks = {i: (t, TokenKind.SPECIAL) for i, t in enumerate([b"<|channel|>", b"<|message|>"])}
    more = {2: (b"analysis", TokenKind.TEXT), 3: (b"<|return|>", TokenKind.SPECIAL)}
    table = TokenBytes.of(marks | more | {4: (b"<|end|>", TokenKind.SPECIAL)}, 5)
    tracker = make(structure, table)
    tracker.feed([0, 2, 1])
    assert tracker.block == 1
    tracker.feed([2, 4])
    assert tracker.block == 0
    tracker.feed([0, 2, 1, 3])
    assert tracker.block == 0


@each_tracker
def test_a_megabyte_of_half_delimiters_takes_linear_time(make: Callable[..., Any]) -> None:
    size = 200 if make is BlockTracker else 20_000
    table, _ = spelled(b"<" * 50, b"`" * 50, b"<tool_call" * 5, b"\\$" * 25, b"\n```" * 12)
    tracker = make(AGENT, table)
    tracker.feed([token for token in range(5) for _ in range(size)])
    assert tracker.block in range(len(KINDS))


def test_the_native_tracker_is_taken_where_it_is_built() -> None:
    tracker = make_tracker(AGENT, spelled(b"a")[0])
    assert type(tracker) is TRACKERS[-1]
