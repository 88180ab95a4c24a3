from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite.streaming import INCOMPLETE, TextStream
from dlite.target import TargetModel

TEXT = "naïve 🙂👩‍👩‍👧 日本語\n\tdef f(x):  return x"


def pieces(tokenizer, tokens: list[int], sizes: list[int]) -> tuple[list[str], str]:
    """What a stream shows when `tokens` arrive in groups of `sizes`, and its flush."""
    stream, shown, start = TextStream(tokenizer), [], 0
    for size in [*sizes, len(tokens)]:
        shown.append(stream.push(tokens[start : start + size]))
        start += size
    return shown, stream.flush()


def encode(target: TargetModel, text: str) -> list[int]:
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_no_piece_ends_within_a_character(tiny_target: TargetModel) -> None:
    tokens = encode(tiny_target, TEXT)
    assert len(tokens) > len(TEXT), "some character must span several tokens"
    shown, rest = pieces(tiny_target.tokenizer, tokens, [1] * len(tokens))
    assert "".join(shown) == TEXT and rest == ""
    assert not any(INCOMPLETE in piece for piece in shown)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(0, 8), max_size=40))
def test_pieces_join_to_the_whole_text_however_tokens_arrive(
    tiny_target: TargetModel, text: str, sizes: list[int]
) -> None:
    tokens = encode(tiny_target, text)
    shown, rest = pieces(tiny_target.tokenizer, tokens, sizes)
    assert "".join(shown) + rest == tiny_target.tokenizer.decode(tokens)


def test_bytes_that_never_complete_a_character_come_out_at_the_end(
    tiny_target: TargetModel,
) -> None:
    tokens = encode(tiny_target, "ok 🙂")[:-1]
    shown, rest = pieces(tiny_target.tokenizer, tokens, [1] * len(tokens))
    assert "".join(shown) == "ok " and set(rest) == {INCOMPLETE}


@pytest.mark.parametrize("seed", range(3))
def test_arbitrary_tokens_of_a_model_lose_no_text(tiny_target: TargetModel, seed: int) -> None:
    tokens = random.Random(seed).choices(range(len(tiny_target.tokenizer)), k=100)
    shown, rest = pieces(tiny_target.tokenizer, tokens, [1] * len(tokens))
    assert "".join(shown) + rest == tiny_target.tokenizer.decode(tokens, skip_special_tokens=True)
