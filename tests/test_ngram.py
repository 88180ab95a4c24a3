"""Prompt lookup against the obvious search, and on a target."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import save_tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from dlite.decode import decode
from dlite.drafters.ngram import NgramDrafter
from dlite.target import TargetModel
from dlite.types import Request, View


def search(tokens: list[int], max_n: int, min_n: int, max_draft: int) -> list[int]:
    """The definition: longest suffix first, most recent earlier occurrence that a token follows."""
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if n <= len(tokens) and tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + max_draft]
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    later=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    sizes=st.sampled_from([(3, 1), (2, 2), (4, 2), (1, 1)]),
    max_draft=st.integers(0, 5),
)
def test_incremental_lookup_equals_the_search(
    prompt: list[int], later: list[list[int]], sizes: tuple[int, int], max_draft: int
) -> None:
    """Catches a suffix that finds itself, stale positions, and tokens indexed twice or never."""
    max_n, min_n = sizes
    drafter = NgramDrafter(max_n=max_n, min_n=min_n)
    request = Request("r", prompt, 99)
    drafter.start(request)
    tokens = list(prompt)
    for new in [[], *later]:
        tokens += new
        (draft,) = drafter.propose([View(request, tokens, max_draft)])
        assert draft.tokens == search(tokens, max_n, min_n, max_draft)


def test_two_requests_do_not_see_each_others_tokens() -> None:
    drafter = NgramDrafter()
    first, second = Request("a", [1, 2, 3, 1, 2], 9), Request("b", [1, 2], 9)
    drafter.start(first)
    drafter.start(second)
    drafts = drafter.propose([View(first, first.prompt, 4), View(second, second.prompt, 4)])
    assert [draft.tokens for draft in drafts] == [[3, 1, 2], []]


def test_a_finished_request_leaves_nothing_behind() -> None:
    drafter = NgramDrafter()
    request = Request("a", [1, 2, 1], 9)
    drafter.start(request)
    drafter.propose([View(request, request.prompt, 4)])
    drafter.finish(request)
    assert not drafter._ends
    assert not drafter._indexed


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 3), (3, 0)])
def test_impossible_sizes_are_refused(max_n: int, min_n: int) -> None:
    with pytest.raises(ValueError, match=rf"sizes {min_n} to {max_n}; give 1 <= min_n"):
        NgramDrafter(max_n=max_n, min_n=min_n)


def test_greedy_output_is_unchanged_on_a_target_that_repeats_itself(tmp_path: Path) -> None:
    """Small weights make loops, so drafts are accepted, and rejected."""
    folder = save_tiny_llama(tmp_path, initializer_range=0.03)
    target = TargetModel.load(str(folder))
    requests = [Request(str(i), [3 + i, 90, 3 + i, 7 * i + 4, 90], 60) for i in range(6)]
    plain = decode(target, requests, None, batch_size=6)
    drafted = decode(target, requests, NgramDrafter(), batch_size=4)
    assert [c.tokens for c in drafted.completions] == [c.tokens for c in plain.completions]
    rounds = [r for done in drafted.completions for r in done.rounds]
    assert any(r.accepted == r.drafted > 2 for r in rounds)
    assert any(0 < r.accepted < r.drafted for r in rounds)
