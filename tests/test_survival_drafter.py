"""The survival policy over a session's memory."""

from __future__ import annotations

from typing import Any

import pytest

from dlite.drafters.memory import Memory
from dlite.drafters.registry import build
from dlite.drafters.survival import SurvivalDrafter, SurvivalOptions
from dlite.retrieval import Automaton
from dlite.survival import Outcome, Prior, fit
from dlite.types import (
    Draft,
    Evidence,
    Request,
    Sampling,
    SessionKey,
    SourceClass,
    Verdict,
    View,
)

LIVE, STATIC = SourceClass.PROMPT, SourceClass.GLOBAL
PROMPT = [1, 2, 3, 4, 5, 9, 8, 2, 3]  # "2 3" goes on with 4 5
CORPUS = [2, 3, 7, 7, 7, 7]


def prior(live: float, static: float) -> Prior:
    """Each token is accepted with this chance, whatever matched."""
    return fit(
        Outcome(Evidence(source, match, 1, 1), 1, int(k < 1000 * chance))
        for source, chance in ((LIVE, live), (STATIC, static))
        for match in (1, 2, 3)
        for k in range(1000)
    )


def drafter(known: Prior, **options: Any) -> SurvivalDrafter:
    corpus = Automaton()
    corpus.extend(CORPUS)
    corpus.end_segment()
    chosen = SurvivalOptions(**options)
    return SurvivalDrafter(Memory(chosen, corpus=corpus), chosen, known)


def ask(
    policy: SurvivalDrafter, session: str = "s", tokens: list[int] = PROMPT, **changes: Any
) -> tuple[Request, Draft]:
    request = Request(f"r{session}", PROMPT, 99, session=SessionKey("t", session), **changes)
    policy.start(request)
    (draft,) = policy.propose([View(request, list(tokens), 4)])
    return request, draft


@pytest.mark.parametrize(
    ("live", "static", "tokens"), [(0.6, 0.2, [4, 5, 9, 8]), (0.2, 0.6, [7, 7, 7, 7])]
)
def test_the_candidate_of_the_longer_match_is_taken_whatever_it_promises(
    live: float, static: float, tokens: list[int]
) -> None:
    _, draft = ask(drafter(prior(live, static)))
    assert draft.tokens == tokens
    assert draft.survival is not None and len(draft.survival) == 4
    assert draft.survival[0] == pytest.approx(0.6, abs=0.03)


def test_a_threshold_is_a_price_of_the_first_token_only() -> None:
    known = prior(0.6, 0.2)
    _, whole = ask(drafter(known))
    assert whole.survival is not None
    least = whole.survival[1]
    _, cut = ask(drafter(known, threshold=least))
    assert cut.tokens == whole.tokens[:2] and cut.survival == whole.survival[:2]
    _, none = ask(drafter(known, threshold=0.9))
    assert none.tokens == []


def test_one_session_learns_from_another() -> None:
    policy = drafter(prior(0.6, 0.5))
    first, alone = ask(policy, "a")
    for _ in range(300):  # live drafts always fail here
        policy.observe(first, alone, Verdict(0, 0))
    (learnt,) = policy.propose([View(first, PROMPT, 4)])
    assert learnt.tokens == [7, 7, 7, 7]
    _, other = ask(policy, "b")
    assert (other.tokens, other.survival) == (alone.tokens, alone.survival)
    policy.finish(first)
    policy.close(SessionKey("t", "a"))
    _, again = ask(policy, "a")
    assert (again.tokens, again.survival) == (alone.tokens, alone.survival)


def test_sampled_calls_learn_from_greedy_ones() -> None:
    policy = drafter(prior(0.6, 0.5))
    request, draft = ask(policy)
    for _ in range(300):
        policy.observe(request, draft, Verdict(0, 0))
    policy.finish(request)
    _, sampled = ask(policy, sampling=Sampling(1.0))
    assert sampled.tokens == [4, 5, 9, 8]


def test_a_closed_session_still_drafts_or_crashes() -> None:
    policy = drafter(prior(0.6, 0.5))
    request, draft = ask(policy)
    policy.close(SessionKey("t", "s"))
    assert policy.propose([View(request, PROMPT, 4)])[0].tokens == []
    policy.observe(request, draft, Verdict(0, 0))
    policy.finish(request)


def test_an_impossible_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold is 1.0; give a number in \[0, 1\)"):
        build("survival", {"threshold": 1.0})
