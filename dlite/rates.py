"""Acceptance by draft position, for training and evaluation alike.

A round that a stop token or the length limit cut was not judged to its end and is left out. Over
all other rounds tau = 1 + the sum of the unconditional rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlite.types import Round


def acceptance_by_position(rounds: Iterable[Round]) -> list[float]:
    """Unconditional rates: the share of rounds in which draft tokens 1..k were all accepted."""
    whole = whole_rounds(rounds)
    return [sum(r.accepted >= k for r in whole) / len(whole) for k in _positions(whole)]


def conditional_acceptance_by_position(rounds: Iterable[Round]) -> list[float | None]:
    """Share of accepted tokens among drafted k-th tokens whose predecessors were all accepted;
    None where there were none."""
    whole = whole_rounds(rounds)
    rates: list[float | None] = []
    for k in _positions(whole):
        reached = [r for r in whole if r.drafted >= k and r.accepted >= k - 1]
        rates.append(sum(r.accepted >= k for r in reached) / len(reached) if reached else None)
    return rates


def whole_rounds(rounds: Iterable[Round]) -> list[Round]:
    return [r for r in rounds if not r.cut]


def _positions(rounds: Sequence[Round]) -> range:
    return range(1, max((r.drafted for r in rounds), default=0) + 1)
