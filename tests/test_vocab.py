from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite.model.vocab import draft_to_target, vocab_maps


def test_the_most_frequent_ids_are_kept_in_ascending_order() -> None:
    d2t, t2d = vocab_maps(torch.tensor([5, 0, 9, 1, 7, 0]), 3)
    assert draft_to_target(d2t).tolist() == [0, 2, 4]
    assert d2t.tolist() == [0, 1, 2]
    assert t2d.tolist() == [True, False, True, False, True, False]
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool


def test_fewer_seen_ids_than_asked_for_are_padded_to_the_exact_size() -> None:
    d2t, _ = vocab_maps(torch.tensor([0, 0, 0, 4, 0, 0]), 3)
    assert draft_to_target(d2t).tolist() == [0, 1, 3]


def test_rows_that_only_pad_the_table_are_never_proposed_even_when_counted() -> None:
    d2t, t2d = vocab_maps(torch.tensor([0, 1, 0, 0, 99, 99]), 4, num_real_ids=4)
    assert draft_to_target(d2t).tolist() == [0, 1, 2, 3]
    assert len(t2d) == 6
    assert not t2d[4:].any()


def test_an_unseen_end_token_is_kept_in_place_of_the_rarest() -> None:
    d2t, _ = vocab_maps(torch.tensor([3, 2, 1, 0]), 2, always={3})
    assert draft_to_target(d2t).tolist() == [0, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_maps_have_exact_size_agree_and_keep_no_rarer_id(counts: list[int], data) -> None:
    num_real = data.draw(st.integers(1, len(counts)))
    size = data.draw(st.integers(1, num_real))
    d2t, t2d = vocab_maps(torch.tensor(counts), size, num_real_ids=num_real)
    kept = draft_to_target(d2t).tolist()
    assert len(kept) == size
    assert kept == t2d.nonzero().squeeze(-1).tolist()
    dropped = set(range(num_real)) - set(kept)
    assert all(counts[k] >= counts[d] for k in kept for d in dropped)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (7, {}, "draft_vocab_size is 7; give 1 .* to 6"),
        (5, {"num_real_ids": 4}, "draft_vocab_size is 5; give 1 .* to 4"),
        (0, {}, "draft_vocab_size is 0"),
        (1, {"always": [1, 2]}, "draft_vocab_size is 1; give 2"),
        (3, {"always": [6]}, r"always-kept ids \[6\] must lie in 0 .. 5"),
        (3, {"num_real_ids": 9}, "num_real_ids is 9, but counts were given for 6 ids"),
    ],
)
def test_sizes_that_disagree_are_refused_with_the_allowed_range(size, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_maps(torch.ones(6, dtype=torch.int64), size, **options)
