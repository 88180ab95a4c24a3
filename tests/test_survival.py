"""Survival curves: what a verdict teaches, and what a prior knows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dlite.survival import Calibration, Outcome, Prior, Survival, fit, shipped_prior
from dlite.types import Draft, Evidence, SourceClass

PROMPT, GLOBAL = SourceClass.PROMPT, SourceClass.GLOBAL


def evidence(match: int = 5, support: int = 1, votes: int = 1, source=PROMPT) -> Evidence:
    return Evidence(source, match, support, votes)


def draws(hazards: list[float], count: int, longest: int = 9) -> list[Outcome]:
    """Drafts of random length whose token j is accepted with chance `hazards[j]`."""
    generator = random.Random(0)
    found = []
    for _ in range(count):
        drafted = generator.randint(1, longest)
        accepted = 0
        while accepted < drafted and generator.random() < hazards[min(accepted, len(hazards) - 1)]:
            accepted += 1
        found.append(Outcome(evidence(), drafted, accepted))
    return found


HAZARDS = [0.5, 0.7, 0.8, 0.9]
TRUE_CURVE = [0.5, 0.35, 0.28, 0.252]


def test_a_draft_that_ended_early_counts_as_rejected() -> None:
    """Right-censored: the mean over short, fully accepted drafts must not pull the curve down."""
    curve = Survival(fit(draws(HAZARDS, 40_000))).curve(evidence(), 4)
    assert curve == pytest.approx(TRUE_CURVE, abs=0.01)


def test_a_session_does_not_learn_or_forgets_its_prior_at_once() -> None:
    learnt = Survival(fit(draws([0.95] * 4, 5000)))
    assert learnt.curve(evidence(), 1)[0] > 0.9
    outcomes = draws(HAZARDS, 1500)
    learnt.observe(*outcomes[0])
    assert learnt.curve(evidence(), 1)[0] > 0.85
    for outcome in outcomes[1:]:
        learnt.observe(*outcome)
    assert learnt.curve(evidence(), 4) == pytest.approx(TRUE_CURVE, abs=0.06)
    assert learnt.curve(evidence(match=50), 1)[0] > 0.9  # other cells are left alone


def test_what_a_session_learnt_shows_in_another() -> None:
    prior = fit(draws([0.95] * 4, 500))
    other, before = Survival(prior), Survival(prior).curve(evidence(), 9)
    mine = Survival(prior)
    for _ in range(50):
        mine.observe(evidence(), 3, 0)
    assert mine.curve(evidence(), 9) != before == other.curve(evidence(), 9)


def test_a_thin_cell_leans_on_its_neighbours() -> None:
    prior = fit([Outcome(evidence(7), 1, 1)] * 300 + [Outcome(evidence(2), 1, 0)] * 300)
    survival = Survival(prior)
    unseen = survival.curve(evidence(8, source=GLOBAL), 1)[0]
    assert unseen > 0.8 > 0.2 > survival.curve(evidence(2, source=GLOBAL), 1)[0]


def test_curves_never_rise() -> None:
    survival = Survival(shipped_prior())
    for match in (1, 3, 9, 60):
        curve = survival.curve(evidence(match), 64)
        assert len(curve) == 64 and sorted(curve, reverse=True) == curve
        assert 0 < curve[-1] <= curve[0] < 1


def test_the_shipped_prior_is_another_than_what_sessions_show() -> None:
    """Longer matches hold longer, and what all occurrences agree on is safer than a minority."""
    survival = Survival(shipped_prior())
    source = SourceClass.SAME_BLOCK
    first = [survival.curve(evidence(m, source=source), 1)[0] for m in (1, 3, 7, 20, 60)]
    assert sorted(first) == first and first[0] < 0.45 and first[-1] > 0.9
    agreed, minority = (survival.curve(evidence(5, 4, v, source), 1)[0] for v in (4, 1))
    assert agreed > minority + 0.2


def test_priors_read_back_as_written(tmp_path: Path) -> None:
    prior = fit(draws(HAZARDS, 300))
    prior.write(tmp_path / "priors.json", "a test")
    again = Prior.read(tmp_path / "priors.json")
    assert Survival(again).curve(evidence(), 9) == Survival(prior).curve(evidence(), 9)


@pytest.mark.parametrize("text", ["{", "[]", '{"counts": {"NOWHERE 1 once": []}}', "{}"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "priors.json").write_text(text)
    with pytest.raises(ValueError, match=r"priors.json holds no survival priors .* eval.profile"):
        Prior.read(tmp_path / "priors.json")


def test_confidence_says_nothing_about_acceptance() -> None:
    record = Calibration()
    generator = random.Random(0)
    for _ in range(2000):
        confidence = generator.choice([0.3, 0.99])
        record.observe(Draft([1], confidence=[confidence]), 1, generator.random() < confidence)
    sure, unsure = (record.curve(Draft([1], confidence=[q]))[0] for q in (0.99, 0.3))
    assert sure > 0.95 and unsure < 0.36


def test_expected_drafts_are_as_long_as_those_seen() -> None:
    record = Calibration()
    for _ in range(500):
        record.observe(Draft([1, 2, 3]), 3, 1)
    assert record.expected() == pytest.approx([0.99, 0.01, 0.007], abs=0.01)
