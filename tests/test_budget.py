"""Budgets against the papers' equations, and never above M(b)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite.budget import Budget, Rule, adaspec, agentspec, redundancy, uniform
from dlite.types import Draft, Evidence, Request, SourceClass, Verdict, View

RULES = {
    "uniform": uniform,
    "adaspec": adaspec,
    "eq1": agentspec(),
    "alg2": agentspec(form="alg2"),
}


def draft(length: int, votes: int = 1, support: int = 1, agreed: int = 0) -> Draft:
    evidence = Evidence(SourceClass.PROMPT, 5, support, votes, agreed)
    return Draft([7] * length, source="sam", evidence=evidence)


drafts = st.lists(
    st.builds(
        lambda length, votes, more, agreed: draft(length, votes, votes + more, agreed),
        st.integers(0, 12),
        st.integers(1, 5),
        st.integers(0, 5),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=8,
)


def views(count: int) -> list[View]:
    return [View(Request(str(i), [1], 99), [1], 32) for i in range(count)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(made=drafts, ridge=st.integers(0, 60), alpha=st.sampled_from([None, 5.0, 1000.0]))
def test_a_budget_exceeds_the_head_room(
    rule: Rule, made: list[Draft], ridge: int, alpha: float | None
) -> None:
    """AgentSpec's equation 3 alone does: its maximum is a floor."""
    batch = len(made)
    chosen = Budget(rule, ridge, alpha).select(views(batch), {"sam": made})
    lengths = [len(choice.draft.tokens) for choice in chosen]
    limit = max(0, ridge - batch)
    assert sum(lengths) <= min(limit, math.inf if alpha is None else alpha // batch)
    assert all(k <= len(d.tokens) for k, d in zip(lengths, made, strict=True))
    if rule in (uniform, adaspec) and alpha is None:
        assert sum(lengths) == min(limit, sum(len(d.tokens) for d in made))


def test_uniform_leaves_to_others_what_a_short_draft_does_not_need() -> None:
    assert uniform([draft(9), draft(1), draft(9)], [0.5] * 3, 8) == [4, 1, 3]


def test_adaspec_shares_by_acceptance_rate() -> None:
    assert adaspec([draft(9), draft(9)], [0.9, 0.5], 7) == [6, 1]  # 0.9^6 > 0.5 > 0.9^7
    budget = Budget(adaspec, 10)
    lucky, unlucky = (view.request for view in views(2))
    for _ in range(20):
        budget.observe(lucky, {}, draft(4), Verdict(4, 0))
        budget.observe(unlucky, {}, draft(4), Verdict(0, 0))
    made = {"sam": [draft(9), draft(9)]}
    assert [len(c.draft.tokens) for c in budget.select(views(2), made)] == [8, 0]
    budget.finish(lucky)
    budget.finish(unlucky)
    assert [len(c.draft.tokens) for c in budget.select(views(2), made)] == [4, 4]


def test_redundancy_is_the_papers() -> None:
    assert redundancy(1, 1) == pytest.approx(0.3)  # equation 1: p(1) = g_min
    assert redundancy(1, 1, form="alg2") == pytest.approx(0.3 + 0.7 * (1 - math.exp(-1)))
    assert redundancy(2, 4) == pytest.approx(0.5 * (0.3 + 0.7 * (1 - math.exp(-3))))
    assert redundancy(0, 0) == 0


def test_agentspec_gives_the_consensus_prefix_and_a_share() -> None:
    g = [redundancy(2, 2), redundancy(1, 1)]
    shares = [math.floor(20 * x / sum(g)) for x in g]
    made = [draft(32, 2, 2), draft(32, 1, 1)]
    assert agentspec()(made, [], 20) == shares
    made = [draft(32, 2, 2), draft(32, 1, 1, agreed=6)]
    assert agentspec()(made, [], 30)[1] == max(6, math.floor(30 * g[1] / sum(g)))


def test_what_is_over_the_budget_goes_from_the_least_redundant_ends() -> None:
    made = [draft(4, 2, 2, agreed=4), draft(4, 1, 2, agreed=4), draft(4, 1, 2, agreed=4)]
    assert agentspec()(made, [], 7) == [4, 1, 2]


def test_no_candidates_divide_by_zero() -> None:
    assert agentspec()([Draft(), Draft()], [], 9) == [0, 0]


def test_a_draft_that_counts_no_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ngram3' counts no candidates.*uniform or adaspec"):
        agentspec()([Draft([1], source="ngram3")], [], 9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: agentspec(form="eq2"), "form is 'eq2'; choose eq1 or alg2"),
        (lambda: agentspec(g_min=1.5), r"g_min is 1.5; give a number in \[0, 1\]"),
        (lambda: Budget(uniform, -1), "ridge_tokens is -1; give a number >= 0"),
        (lambda: Budget(uniform, 9, -2.0), "alpha is -2.0; give a number >= 0"),
    ],
)
def test_impossible_options_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
