"""Every engine, native and in Python, against brute force."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite.retrieval import automaton, chain, frozen
from dlite.retrieval.base import END, NOTHING, Rule, step
from dlite.retrieval.choose import choose
from tests.retrieval_oracle import (
    CappedStrings,
    Follower,
    continuation,
    growth,
    longest_match,
    match_among_newest,
    segment_of,
    tokens_of,
)

native: ModuleType | None = None
if importlib.util.find_spec("dlite.retrieval._native"):
    from dlite.retrieval import _native as native

AUTOMATA: list[Any] = [automaton.Automaton, *([native.Automaton] if native else [])]
CHAINS: list[Any] = [chain.HashChain, *([native.HashChain] if native else [])]
FROZEN: list[Any] = [frozen.Frozen, *([native.Frozen] if native else [])]
INDEXES = AUTOMATA + CHAINS
named = pytest.mark.parametrize("make", INDEXES, ids=lambda c: f"{c.__module__}.{c.__name__}")
K = 5

# Few symbols, so that strings recur; a byte over 249 ends the segment.
TEXTS = st.tuples(st.integers(1, 4), st.binary(max_size=24))
QUERIES = st.tuples(st.integers(1, 4), st.binary(max_size=24), st.binary(max_size=12))
often = settings(max_examples=2000, deadline=None)


@often
@given(TEXTS)
def test_an_automaton_finds_what_its_own_stream_repeats(drawn: tuple[int, bytes]) -> None:
    indexes = [make(chain_cap=0) for make in AUTOMATA]
    for text, rule in growth(indexes, tokens_of(*drawn)):
        match = longest_match(text, segment_of(text))
        expected = continuation(text, match, rule, K)
        assert [index.find(rule, K) for index in indexes] == [expected] * len(indexes)


@often
@given(QUERIES)
def test_a_cursor_lives_across_the_clones_of_a_growing_automaton(
    drawn: tuple[int, bytes, bytes],
) -> None:
    num_symbols, data, query = drawn
    indexes = [make(chain_cap=0) for make in AUTOMATA]
    cursors = [index.cursor() for index in indexes]
    follower = Follower()
    waiting = list(query)
    for text, rule in growth(indexes, tokens_of(num_symbols, data)):
        if waiting and waiting[-1] % 2:
            token = waiting.pop() // 2 % num_symbols
            follower.extend(text, token)
            for cursor in cursors:
                cursor.extend([token])
        elif waiting:
            waiting.pop()
        expected = continuation(text, longest_match(text, follower.matched()), rule, K)
        assert [cursor.find(rule, K) for cursor in cursors] == [expected] * len(cursors)


@often
@given(TEXTS, st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 2, 50]))
def test_a_chain_finds_the_longest_among_its_candidates(
    drawn: tuple[int, bytes], min_match: int, more: int, candidates: int
) -> None:
    limits = (min_match, min_match + more, candidates)
    indexes = [make(*limits) for make in CHAINS]
    for text, rule in growth(indexes, tokens_of(*drawn)):
        match = match_among_newest(text, segment_of(text), True, limits)
        expected = continuation(text, match, rule, K)
        assert [index.find(rule, K) for index in indexes] == [expected] * len(indexes)


@often
@given(QUERIES, st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 2, 50]))
def test_a_chain_cursor_finds_the_longest_among_its_candidates(
    drawn: tuple[int, bytes, bytes], min_match: int, more: int, candidates: int
) -> None:
    num_symbols, data, query = drawn
    text, limits = tokens_of(num_symbols, data), (min_match, min_match + more, candidates)
    indexes = [make(*limits) for make in CHAINS]
    for _ in growth(indexes, text):
        pass
    cursors = [index.cursor() for index in indexes]
    stream: list[int] = []
    for byte in query:
        stream.append(byte % num_symbols)
        for cursor in cursors:
            cursor.extend(stream[-1:])
        match = match_among_newest(text, stream, False, limits)
        rule = Rule(byte // num_symbols % 4)
        expected = continuation(text, match, rule, K)
        assert [cursor.find(rule, K) for cursor in cursors] == [expected] * len(cursors)


@settings(max_examples=1000, deadline=None)
@given(TEXTS, st.sampled_from([2, 3, 4]), st.sampled_from([2, 3, 5, 256]))
def test_the_chain_cap_drops_only_updates_of_the_shortest_suffixes(
    drawn: tuple[int, bytes], chain_cap: int, search_bound: int
) -> None:
    """Also that a search is cut at its bound, in the order in which continuations first came."""
    indexes = [make(chain_cap, search_bound) for make in AUTOMATA]
    strings = CappedStrings(chain_cap, search_bound)
    text = [token for token in tokens_of(*drawn) if token != END][:24]
    for so_far, rule in growth(indexes, text):
        strings.append(so_far[-1])
        state = strings.state_of(so_far)
        length, earlier = strings.length[state], strings.earlier.get(state)
        expected = choose(strings, state, length, earlier, rule, K, search_bound)
        assert [index.find(rule, K) for index in indexes] == [expected] * len(indexes)


@often
@given(QUERIES)
def test_a_frozen_corpus_answers_as_brute_force(drawn: tuple[int, bytes, bytes]) -> None:
    num_symbols, data, query = drawn
    text = [*tokens_of(num_symbols, data), END]
    indexes = [make(chain_cap=2) for make in AUTOMATA]  # freezing counts exactly all the same
    for _ in growth(indexes, text):
        pass
    arrays = [index.freeze() for index in indexes]
    for name, array in arrays[0].named().items():
        assert all((getattr(other, name) == array).all() for other in arrays)
    cursors = [make(arrays[0]).cursor() for make in FROZEN]
    stream: list[int] = []
    for byte in query:
        stream.append(byte % num_symbols)
        rule = Rule(byte // num_symbols % 4)
        for cursor in cursors:
            cursor.extend(stream[-1:])
        expected = continuation(text, longest_match(text, stream), rule, K)
        assert [cursor.find(rule, K) for cursor in cursors] == [expected] * len(cursors)


needs_native = pytest.mark.skipif(native is None, reason="the native extension isn't built")


@needs_native
@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 300), max_size=60), max_size=8), st.sampled_from(Rule))
def test_a_native_batch_answers_as_the_twins_one_by_one(
    chunks: list[list[int]], rule: Rule
) -> None:
    """Wide vocabularies too, which put hash tables behind states and grow the chain's."""
    assert native
    twins: list[Any] = [automaton.Automaton(), chain.HashChain()]
    indexes: list[Any] = [native.Automaton(), native.HashChain()]
    twin_sources = twins + [index.cursor() for index in twins]
    sources = indexes + [index.cursor() for index in indexes]
    for tokens in chunks:
        each = [tokens + tokens[:5], tokens[::2], tokens[1:], tokens[:9]]
        assert native.step(sources, each, rule, K) == step(twin_sources, each, rule, K)


@named
def test_a_match_does_not_run_into_the_segment_before(make: Any) -> None:
    index = make(*((1,) if make in CHAINS else ()))
    for segment in ([1, 2, 3], [1, 2, 3]):
        index.extend(segment)
        index.end_segment()
    index.extend([3])
    assert index.find(Rule.RECENT, K) == NOTHING
    index.extend([2])
    assert index.find(Rule.RECENT, K)[:2] == ([3], 1)


@named
@pytest.mark.parametrize("token", [-1, -7, 2**31 - 1, 2**40])
def test_an_id_that_is_no_token_is_refused_and_nothing_is_taken(make: Any, token: int) -> None:
    index = make()
    with pytest.raises(ValueError, match=rf"token id {token} can't be indexed; give ids in 0"):
        index.extend([5, 6, token])
    assert len(index) == 0


@named
def test_an_unknown_rule_names_those_that_exist(make: Any) -> None:
    index = make()
    index.extend([1, 2, 3, 4, 1, 2, 3])
    with pytest.raises(ValueError, match=r"rule is 4; give one of \[0, 1, 2, 3\]"):
        index.find(4, K)


@named
def test_a_closed_index_and_its_cursors_refuse_every_use(make: Any) -> None:
    index = make()
    index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    cursor = index.cursor()
    index.close()
    uses = [
        lambda: index.extend([1]),
        lambda: index.find(Rule.RECENT, K),
        lambda: len(index),
        index.cursor,
        index.end_segment,
        lambda: cursor.extend([1]),
        lambda: cursor.find(Rule.RECENT, K),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="this index is closed; open a new one"):
            use()
    index.close()


@pytest.mark.parametrize("make", AUTOMATA)
def test_limits_of_an_automaton_that_would_break_it_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"chain_cap is 1; give 0 \(no cap\) or an integer >= 2"):
        make(chain_cap=1)
    with pytest.raises(ValueError, match="search_bound is 1; give an integer >= 2"):
        make(search_bound=1)


@pytest.mark.parametrize("make", CHAINS)
def test_limits_of_a_chain_that_would_break_it_are_refused(make: Any) -> None:
    for limits, message in (
        ((0,), "min_match is 0; give an integer in 1 .. 8"),
        ((3, 2), "max_match is 2; give an integer in 3 .. 1024"),
        ((3, 64, 0), "candidates is 0; give an integer in 1 .. 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*limits)


@named
@pytest.mark.parametrize("period", [1, 37])
def test_repetitive_text_stays_linear(make: Any, period: int) -> None:
    """Without the chain cap this would run for minutes."""
    size = 400_000 if make.__module__.endswith("_native") else 65_536
    index = make()
    index.extend([position % period for position in range(size)])
    assert index.find(Rule.VOTE, 16).tokens[0] == size % period


@named
def test_numpy_tokens_are_taken_as_lists_are(make: Any) -> None:
    np = pytest.importorskip("numpy")
    indexes = [make(), make(), make()]
    tokens = [1, 2, 3, 4, 1, 2, 3]
    for index, given_as in zip(
        indexes, (tokens, np.array(tokens, dtype=np.int32), np.array(tokens)), strict=True
    ):
        index.extend(given_as)
    assert len({str(index.find(Rule.RECENT, K)) for index in indexes}) == 1


@pytest.mark.parametrize("make", AUTOMATA)
def test_an_open_segment_is_not_frozen(make: Any) -> None:
    index = make()
    index.extend([1, 2])
    with pytest.raises(ValueError, match=r"the last segment is open; call end_segment\(\)"):
        index.freeze()
