"""Plans against every possible plan; the native planner against its twin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite import planner as planner_module
from dlite import slots
from dlite.costs import CostTable
from dlite.planner import Planner
from dlite.types import Draft, Request, Sampling, Verdict, View

ROOFLINE = CostTable.roofline(256, per_token=0.0005, neural=(0.08, 0.0003))
falling = st.lists(st.floats(0.3, 1.0), max_size=4).map(lambda h: np.cumprod(h).tolist())
menus = st.lists(st.lists(falling, max_size=3), min_size=1, max_size=3)


def views(count: int, max_draft: int = 32, **changes: Any) -> list[View]:
    return [View(Request(str(i), [1], 99, **changes), [1], max_draft) for i in range(count)]


def every_plan(options: Sequence[Sequence[Sequence[float]]], seconds: np.ndarray) -> float:
    """The best rate of all choices and cuts."""
    cuts = [
        [(0, 0.0), *((k, sum(curve[:k])) for curve in menu for k in range(1, 1 + len(curve)))]
        for menu in options
    ]
    return max(
        (len(options) + sum(gain for _, gain in chosen)) / seconds[sum(k for k, _ in chosen)]
        for chosen in itertools.product(*cuts)
    )


def rate_of(
    options: Sequence[Sequence[Sequence[float]]],
    picks: Sequence[tuple[int, int]],
    seconds: np.ndarray,
) -> float:
    gain = sum(sum(m[o][:k]) for m, (o, k) in zip(options, picks, strict=True) if k)
    return (len(options) + gain) / seconds[sum(k for _, k in picks)]


@given(options=menus, per_token=st.sampled_from([0.0, 0.02, 0.1, 0.4]))
def test_a_slot_is_taken_that_costs_more_than_it_gives_or_left_that_gives_more(
    options: list[list[list[float]]], per_token: float
) -> None:
    """Where a token always costs the same, no plan beats ours, choices between drafts included."""
    seconds = 1 + per_token * np.arange(13)
    picks, rate = planner_module.plan(options, seconds, 0.0)
    assert rate == pytest.approx(every_plan(options, seconds), rel=1e-12)
    assert rate_of(options, picks, seconds) >= rate * (1 - 1e-12)


@given(
    options=st.lists(falling.map(lambda c: [c]), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.5]), min_size=12, max_size=12),
)
def test_the_search_stops_at_the_first_fall_of_a_staircase(
    options: list[list[list[float]]], steps: list[float]
) -> None:
    seconds = np.cumsum([1.0, *steps])
    _, rate = planner_module.plan(options, seconds, 0.0)
    assert rate == pytest.approx(every_plan(options, seconds), rel=1e-12)


@given(
    options=menus,
    steps=st.lists(st.sampled_from([0.0, 0.01, 0.3]), max_size=12),
    guard=st.sampled_from([0.0, 0.03, 0.5]),
)
def test_native_plans_differ_from_the_twins(
    options: list[list[list[float]]], steps: list[float], guard: float
) -> None:
    seconds = np.cumsum([1.0, *steps])
    assert planner_module.plan(options, seconds, guard) == slots.plan(options, seconds, guard)


def test_native_and_twin_agree_on_a_large_batch() -> None:
    generator = np.random.default_rng(0)
    curves = [
        [np.cumprod(generator.uniform(0.6, 1, n)).tolist() for n in (32, 7)] for _ in range(200)
    ]
    seconds = ROOFLINE.step_seconds(200, 200 + 200 * 32)
    for seconds_N in (seconds, np.ones_like(seconds)):
        found = planner_module.plan(curves, seconds_N, 0.03)
        assert found == slots.plan(curves, seconds_N, 0.03)
        assert any(k for _, k in found[0])


def proposals(*curves: list[float]) -> list[Draft]:
    return [Draft(list(range(len(c))), survival=c, source="a") for c in curves]


def test_nothing_is_drafted_for_a_gain_within_the_guard() -> None:
    costs = CostTable.roofline(256, per_token=0.0)
    drafts = {"a": proposals([0.029])}
    assert Planner(costs).select(views(1), drafts)[0].draft.tokens == []
    assert Planner(costs, guard=0.02).select(views(1), drafts)[0].draft.tokens == [0]


def test_a_full_device_drafts_nothing() -> None:
    drafts = {"a": proposals(*[[0.9, 0.8]] * 256)}
    chosen = Planner(ROOFLINE).select(views(256), drafts)
    assert {len(choice.draft.tokens) for choice in chosen} == {0}


def test_one_drafter_and_no_cost_is_not_that_drafter() -> None:
    drafts = {"a": [Draft([5, 6, 7], source="a"), Draft(), Draft([8])]}
    chosen = Planner().select(views(3), drafts)
    assert [choice.draft for choice in chosen] == drafts["a"]


def test_the_better_draft_is_left_or_its_survival_forgotten() -> None:
    drafts = {"a": proposals([0.5, 0.2]), "b": proposals([0.6, 0.55])}
    (choice,) = Planner(ROOFLINE).select(views(1), drafts)
    assert choice.drafter == "b" and choice.draft.survival == [0.6, 0.55]


def test_a_model_is_run_where_retrieval_copies_well_and_rested_where_the_device_is_full() -> None:
    planner = Planner(ROOFLINE)
    copying = {"a": proposals([0.99] * 32)}
    assert not planner.run_neural("dlite", views(1), copying)
    assert planner.run_neural("dlite", views(1), {"a": proposals([0.1])})
    assert not planner.run_neural("dlite", views(256), {"a": proposals(*[[0.1]] * 256)})


def test_a_drafts_length_depends_on_sampled_tokens() -> None:
    """Cutting a sampled draft after it was drawn would bias the output: point masses only."""
    import torch

    drafts = {"a": [Draft([1], probs_KV=torch.ones(1, 3) / 3)]}
    with pytest.raises(AssertionError, match="chosen before it is drawn"):
        Planner(ROOFLINE).select(views(1, sampling=Sampling(1.0)), drafts)


def test_a_drafter_without_survival_is_judged_by_others_or_by_its_verified_drafts_only() -> None:
    planner = Planner(ROOFLINE)
    request = views(1)[0].request
    for _ in range(400):  # "wrong" is never verified, and yet known to be wrong
        proposed = {"right": Draft([1, 2]), "wrong": Draft([9, 9])}
        planner.select(views(1), {name: [draft] for name, draft in proposed.items()})
        planner.observe(request, proposed, Draft([1, 2]), Verdict(2, 3))
    (choice,) = planner.select(views(1), {"wrong": [Draft([9, 9])], "right": [Draft([1, 2])]})
    assert choice.drafter == "right" and len(choice.draft.tokens) == 2
    (choice,) = planner.select(views(1), {"wrong": [Draft([9, 9])]})
    assert choice.draft.tokens == []


def test_greedy_and_sampled_records_are_mixed() -> None:
    planner = Planner(ROOFLINE)
    for _ in range(200):
        planner.select(views(1), {"a": [Draft([1])]})
        planner.observe(views(1)[0].request, {"a": Draft([1])}, Draft(), Verdict(0, 9))
    assert planner.select(views(1), {"a": [Draft([1])]})[0].draft.tokens == []
    sampled = views(1, sampling=Sampling(1.0))
    assert planner.select(sampled, {"a": [Draft([1])]})[0].draft.tokens == [1]


def test_a_model_that_was_unlucky_is_never_asked_again() -> None:
    planner = Planner(ROOFLINE)
    request = views(1)[0].request
    nothing = {"a": [Draft()]}
    for _ in range(400):
        planner.select(views(1), {"dlite": [Draft([1] * 7)]})
        planner.observe(request, {"dlite": Draft([1] * 7)}, Draft(), Verdict(0, 9))
    asked = [planner.run_neural("dlite", views(1), nothing) for _ in range(6000)]
    assert not asked[0] and asked[-1]
