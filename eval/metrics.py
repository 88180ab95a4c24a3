"""What the figures mean. Every acceptance figure of this project is computed here, or, where
training reports it too, in `dlite.rates`; tau is `dlite.types.tokens_per_step`.

A round that a stop token or the length limit cut counts towards tau and is left out of the
per-position rates, since its draft was not judged to the end. Over all other rounds
tau = 1 + the sum of the unconditional rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dlite.rates import acceptance_by_position as acceptance_by_position
from dlite.rates import conditional_acceptance_by_position, whole_rounds
from dlite.types import Round, tokens_per_step

# Ours, not studied. A chain of equally good positions keeps its conditional rate; a head that is
# fed the wrong previous token keeps far less than half of it.
HEAD_FAULT_RATIO = 0.5
HEAD_FAULT_MIN_ROUNDS = 20


def accept_length(rounds: Iterable[Round]) -> float | None:
    """tau over the steps that drafted; None without any."""
    drafting = [r for r in rounds if r.drafted]
    return tokens_per_step(drafting) if drafting else None


def rejection_rate(rounds: Iterable[Round]) -> float | None:
    """Drafted tokens that did not become output / drafted tokens, over all rounds; None without
    drafted tokens. Tokens behind a stop token count as rejected: verifying them was in vain."""
    rounds = list(rounds)
    drafted = sum(r.drafted for r in rounds)
    return 1 - sum(r.accepted for r in rounds) / drafted if drafted else None


def tau_mean_over_samples(rounds: Iterable[Round]) -> float:
    """The mean of each request's own tau: short answers weigh as much as long ones."""
    tokens_N, rounds_N = _by_request(rounds)
    return float((tokens_N / rounds_N).mean())


def tau_ci95(
    rounds: Iterable[Round], *, seed: int = 0, num_resamples: int = 2000
) -> tuple[float, float]:
    """95 % confidence interval of tau: percentile bootstrap that draws whole requests."""
    tokens_N, rounds_N = _by_request(rounds)
    picks = np.random.default_rng(seed).integers(len(tokens_N), size=(num_resamples, len(tokens_N)))
    taus = tokens_N[picks].sum(1) / rounds_N[picks].sum(1)
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, one having ended included; None if equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def identical_share(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The share of (output, plain output) pairs that are equal token by token."""
    same = [first_difference(output, plain) is None for output, plain in pairs]
    return sum(same) / len(same)


def head_fault(rounds: Iterable[Round]) -> str | None:
    """A warning when acceptance collapses right behind the first draft token.

    Only a draft model's sequential head knows the tokens drafted so far, so a good first and a
    bad second position point at it.
    """
    rounds = list(rounds)
    reached = sum(r.drafted >= 2 and r.accepted >= 1 for r in whole_rounds(rounds))
    first, second, *_ = [*conditional_acceptance_by_position(rounds), None, None]
    if not first or second is None or reached < HEAD_FAULT_MIN_ROUNDS:
        return None
    if second >= HEAD_FAULT_RATIO * first:
        return None
    return (
        f"conditional acceptance falls from {first:.2f} at draft position 1 to {second:.2f} at "
        "position 2: check which previous token the sequential head is fed, and its weights"
    )


def _by_request(rounds: Iterable[Round]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and rounds [N] of each request."""
    totals: dict[str, list[int]] = {}
    for r in rounds:
        total = totals.setdefault(r.request_id, [0, 0])
        total[0] += r.emitted
        total[1] += 1
    table_N2 = np.array(list(totals.values()), dtype=np.float64)
    return table_N2[:, 0], table_N2[:, 1]
