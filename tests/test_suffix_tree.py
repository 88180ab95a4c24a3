"""arctic-inference's tree behind our protocol: what it shares with the other engines."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite.retrieval.base import Rule
from dlite.retrieval.suffix_tree import SuffixTree
from tests.retrieval_oracle import growth, segment_of, tokens_of

K = 5
QUERIES = st.tuples(st.integers(1, 4), st.binary(max_size=24), st.binary(max_size=12))


@settings(max_examples=300, deadline=None)
@given(QUERIES)
def test_the_suffix_tree_drafts_what_followed_the_match_somewhere(
    drawn: tuple[int, bytes, bytes],
) -> None:
    pytest.importorskip("arctic_inference.suffix_decoding._C")
    num_symbols, data, query = drawn
    tree = SuffixTree()
    cursor = tree.cursor()
    stream: list[int] = []
    for text, _ in growth([tree], tokens_of(num_symbols, data)):
        found = tree.find(Rule.VOTE, K)
        copied = segment_of(text)[len(segment_of(text)) - found.match_length :] + found.tokens
        assert not found.tokens or copied in substrings(text, len(copied))
    for byte in query:
        stream.append(byte % num_symbols)
        cursor.extend(stream[-1:])
        found = cursor.find(Rule.VOTE, K)
        copied = stream[len(stream) - found.match_length :] + found.tokens
        assert not found.tokens or copied in substrings(tokens_of(num_symbols, data), len(copied))


def substrings(text: list[int], size: int) -> list[list[int]]:
    return [text[i : i + size] for i in range(len(text) - size + 1)]


def test_a_closed_suffix_tree_refuses_every_use() -> None:
    pytest.importorskip("arctic_inference.suffix_decoding._C")
    tree = SuffixTree()
    cursor = tree.cursor()
    tree.close()
    for use in (lambda: tree.extend([1]), lambda: tree.find(1, K), lambda: cursor.find(1, K)):
        with pytest.raises(ValueError, match="this index is closed"):
            use()


def test_without_its_package_the_suffix_tree_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding._C", None)
    with pytest.raises(ValueError, match="needs arctic-inference; pip install --no-build"):
        SuffixTree()
