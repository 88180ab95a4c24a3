"""Acceptance figures, worked by hand and by identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite.types import Round, tokens_per_step
from eval import metrics


def whole(drafted: int, accepted: int, request_id: str = "a") -> Round:
    return Round(request_id, drafted, accepted, accepted + 1, cut=False)


# Two requests, K = 3. The cut round emitted two tokens although its whole draft was accepted.
ROUNDS = [
    whole(3, 3),
    whole(3, 0),
    whole(3, 1),
    Round("a", 3, 2, 2, cut=True),
    whole(3, 2, "b"),
    whole(0, 0, "b"),
]


def test_bonus_token_or_the_cut_rounds_tokens_are_left_out_of_tau() -> None:
    assert tokens_per_step(ROUNDS) == pytest.approx((4 + 1 + 2 + 2 + 3 + 1) / 6)


def test_steps_without_a_draft_count_towards_accept_length() -> None:
    assert metrics.accept_length(ROUNDS) == pytest.approx((4 + 1 + 2 + 2 + 3) / 5)
    assert metrics.accept_length([whole(0, 0)]) is None


def test_cut_rounds_enter_the_per_position_rates() -> None:
    assert metrics.acceptance_by_position(ROUNDS) == pytest.approx([3 / 5, 2 / 5, 1 / 5])


def test_conditional_rates_count_rounds_that_drafted_less_or_failed_before() -> None:
    rates = metrics.conditional_acceptance_by_position(ROUNDS)
    assert rates == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    never_reached = metrics.conditional_acceptance_by_position([whole(3, 1), whole(3, 0)])
    assert never_reached == [1 / 2, 0.0, None]


def test_rejection_rate_is_not_over_drafted_tokens() -> None:
    assert metrics.rejection_rate(ROUNDS) == pytest.approx(7 / 15)
    assert metrics.rejection_rate([whole(0, 0)]) is None


def test_mean_over_samples_is_pooled() -> None:
    assert metrics.tau_mean_over_samples(ROUNDS) == pytest.approx((9 / 4 + 4 / 2) / 2)


fixed_k_rounds = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(fixed_k_rounds)
def test_tau_is_one_plus_the_sum_of_unconditional_rates(accepted: list[int]) -> None:
    rounds = [whole(5, n) for n in accepted]
    rates = metrics.acceptance_by_position(rounds)
    assert tokens_per_step(rounds) == pytest.approx(1 + sum(rates))


@given(fixed_k_rounds)
def test_unconditional_rates_are_running_products_of_conditional_ones(accepted: list[int]) -> None:
    rounds = [whole(5, n) for n in accepted]
    product = 1.0
    rates = metrics.conditional_acceptance_by_position(rounds)
    for conditional, unconditional in zip(
        rates, metrics.acceptance_by_position(rounds), strict=True
    ):
        product *= conditional or 0.0
        assert product == pytest.approx(unconditional)


def test_interval_depends_on_the_clock_or_misses_tau() -> None:
    rounds = [whole(7, n % 5, str(n % 8)) for n in range(64)]
    low, high = metrics.tau_ci95(rounds, seed=3)
    assert low < tokens_per_step(rounds) < high
    assert metrics.tau_ci95(rounds, seed=3) == (low, high)


def test_interval_resamples_rounds_in_place_of_whole_requests() -> None:
    """Within a request all rounds are alike: rounds drawn singly would give a far tighter one."""
    rounds = [whole(7, 7 * (n % 2), str(n)) for n in range(4) for _ in range(100)]
    low, high = metrics.tau_ci95(rounds)
    assert high - low > 5


def test_interval_of_equal_requests_has_a_width() -> None:
    assert metrics.tau_ci95([whole(2, 1, str(n)) for n in range(9)]) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None)],
)
def test_outputs_that_differ_in_length_alone_count_as_equal(
    left: list[int], right: list[int], position: int | None
) -> None:
    assert metrics.first_difference(left, right) == position


def test_identical_share() -> None:
    assert metrics.identical_share([([1], [1]), ([1], [2]), ([], []), ([3, 4], [3])]) == 0.5


def test_a_head_that_collapses_behind_the_first_token_goes_unnoticed() -> None:
    collapsed = [whole(7, n) for n in [0, 1, 1, 1, 1, 1, 1, 1, 1, 2] * 10]
    message = metrics.head_fault(collapsed)
    assert message is not None
    assert "from 0.90 at draft position 1 to 0.11 at position 2" in message


def test_a_healthy_head_or_too_little_evidence_is_called_a_fault() -> None:
    healthy = [whole(7, n) for n in [0, 0, 0, 1, 1, 2, 2, 3, 4, 7] * 10]
    assert metrics.head_fault(healthy) is None
    assert metrics.head_fault([whole(7, 1)] * 5) is None
    assert metrics.head_fault([whole(0, 0)] * 50) is None
    assert metrics.head_fault([whole(7, 0)] * 50) is None
