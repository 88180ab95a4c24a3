"""Survival curves: the probability that the first k tokens of a draft are all accepted.

A curve is the product of hazards h_j = P(token j is accepted | those before it were), each a Beta
estimate among like drafts. A verified draft tells of its hazards exactly: accepted positions are
successes, the next one is a failure if it was drafted, and the rest was not observed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlite.types import Draft, Evidence, SourceClass

MATCH_STARTS = (1, 2, 3, 4, 5, 7, 10, 15, 25, 50)  # buckets of match length
SUPPORTS = ("once", "unanimous", "majority", "minority")
POSITION_STARTS = (1, 2, 3, 4, 5, 7, 10, 15, 25)
LONGEST = 64  # no curve is longer
BACK_OFF = 20.0  # observations that a wider cell counts for in a narrower one
PRIOR_WEIGHT = 50.0  # observations that the prior counts for among a session's own
DECAY = 0.5 ** (1 / 1000)  # a count is halved by the next thousand in its place
SHIPPED = Path(__file__).with_name("survival_priors.json")

_MATCH = [bisect_right(MATCH_STARTS, m) - 1 for m in range(MATCH_STARTS[-1] + 1)]
_POSITION = [bisect_right(POSITION_STARTS, j) - 1 for j in range(1, LONGEST + 1)]

Cell = tuple[int, int, int]  # source class, match bucket, support bucket


class Outcome(NamedTuple):
    """`accepted` of `drafted` tokens stood."""

    evidence: Evidence
    drafted: int
    accepted: int


class Promise(NamedTuple):
    """`survival[k]` is the probability that the first k + 1 tokens are all accepted, `expected[k]`
    how many of the first k are."""

    survival: list[float]
    expected: list[float]


def cell_of(source: int, match_length: int, support: int, votes: int) -> Cell:
    if support == 1:
        agreement = 0
    elif votes == support:
        agreement = 1
    else:
        agreement = 2 if 2 * votes > support else 3
    return source, _MATCH[min(match_length, MATCH_STARTS[-1])], agreement


def cell_of_evidence(evidence: Evidence) -> Cell:
    return cell_of(evidence.source, evidence.match_length, evidence.support, evidence.votes)


class Prior:
    """Hazards before a session has said anything, from counts [..., 2] of accepted and observed
    tokens by source class, match bucket, support bucket and position bucket.

    A cell with few observations leans on its source and match, that on the match alone, and that
    on the position.
    """

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts
        accepted, observed = np.moveaxis(counts.astype(float), -1, 0)
        hazard = np.full(accepted.shape, 0.5)
        for axes in ((0, 1, 2), (0, 2), (2,), ()):
            wins, draws = (x.sum(axes, keepdims=True) for x in (accepted, observed))
            hazard = (wins + BACK_OFF * hazard) / (draws + BACK_OFF)
        self._hazards: list = hazard.tolist()
        self._curves: dict[Cell, Promise] = {}

    @cached_property
    def native(self) -> Any:
        from dlite.retrieval import _native

        return _native.Prior(
            np.array(self._hazards), MATCH_STARTS, POSITION_STARTS, PRIOR_WEIGHT, DECAY
        )

    def hazards(self, cell: Cell) -> list[float]:
        """By position bucket."""
        source, match, support = cell
        return self._hazards[source][match][support]

    def curve(self, cell: Cell) -> Promise:
        found = self._curves.get(cell)
        if found is None:
            found = self._curves[cell] = _curve(self.hazards(cell))
        return found

    def write(self, path: Path | str, source: str) -> None:
        """As JSON; `source` says what it was fitted on."""
        cells = {
            f"{SourceClass(s).name} {MATCH_STARTS[m]} {SUPPORTS[u]}": self.counts[s, m, u].tolist()
            for s, m, u in np.argwhere(self.counts[..., 1].sum(-1))
        }
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in cells.items())
        Path(path).write_text(f'{{"source": {json.dumps(source)}, "counts": {{\n{lines}\n}}}}\n')

    @classmethod
    def read(cls, path: Path | str) -> Prior:
        """Raises ValueError for a file that `write` did not write."""
        counts = _no_counts()
        try:
            for name, rows in json.loads(Path(path).read_text())["counts"].items():
                source, match, support = name.split()
                place = SourceClass[source], MATCH_STARTS.index(int(match)), SUPPORTS.index(support)
                counts[place] = rows
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no survival priors ({error}); write them with python -m eval.profile"
            ) from None
        return cls(counts)


def _no_counts() -> np.ndarray:
    shape = len(SourceClass), len(MATCH_STARTS), len(SUPPORTS), len(POSITION_STARTS), 2
    return np.zeros(shape, dtype=np.int64)


def fit(outcomes: Iterable[Outcome]) -> Prior:
    """From drafts of a walk: those that a drafter issued where it really came to draft, which is
    right after a miss. Positions of a text taken evenly promise too much."""
    counts = _no_counts()
    for outcome in outcomes:
        cell = counts[cell_of_evidence(outcome.evidence)]
        for position, accepted in _observed(outcome.drafted, outcome.accepted):
            cell[position] += accepted, 1
    return Prior(counts)


def _observed(drafted: int, accepted: int) -> Iterable[tuple[int, bool]]:
    """Position buckets that a verdict speaks of, and what it says."""
    for j in range(min(accepted + 1, drafted, LONGEST)):
        yield _POSITION[j], j < accepted


@cache
def shipped_prior() -> Prior:
    """Fitted on recorded sessions of several scaffolds and models; the file says which."""
    return Prior.read(SHIPPED)


def native_survival(prior: Prior) -> Any:
    """A session's estimates for the native choice among candidates; see `Survival`."""
    from dlite.retrieval import _native

    return _native.Survival(prior.native)


class Survival:
    """A session's own estimates: the prior's hazards, moved by what became of its drafts."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._counts: dict[Cell, list[list[float]]] = {}
        self._curves: dict[Cell, Promise] = {}

    def curve(self, evidence: Evidence, num_tokens: int) -> list[float]:
        """Survival of tokens 1 .. `num_tokens`, at most 64."""
        return self.of(cell_of_evidence(evidence)).survival[:num_tokens]

    def of(self, cell: Cell) -> Promise:
        """64 tokens long."""
        counts = self._counts.get(cell)
        if counts is None:
            return self.prior.curve(cell)
        found = self._curves.get(cell)
        if found is None:
            hazards = [
                (PRIOR_WEIGHT * prior + accepted) / (PRIOR_WEIGHT + observed)
                for prior, (accepted, observed) in zip(
                    self.prior.hazards(cell), counts, strict=True
                )
            ]
            found = self._curves[cell] = _curve(hazards)
        return found

    def observe(self, evidence: Evidence, drafted: int, accepted: int) -> None:
        cell = cell_of_evidence(evidence)
        counts = self._counts.get(cell)
        if counts is None:
            counts = self._counts[cell] = [[0.0, 0.0] for _ in POSITION_STARTS]
        for position, success in _observed(drafted, accepted):
            count = counts[position]
            count[0] = DECAY * count[0] + success
            count[1] = DECAY * count[1] + 1
        self._curves.pop(cell, None)


def _curve(hazards: Sequence[float]) -> Promise:
    survival = list(accumulate([hazards[bucket] for bucket in _POSITION], mul))
    return Promise(survival, list(accumulate(survival, initial=0.0)))


CONFIDENCE_STARTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
UNKNOWN_HAZARD = 0.65  # not studied: near DLite's mean in its paper, and soon outweighed
UNKNOWN_WEIGHT = 8.0
FADE = 0.999  # per step in which a drafter isn't asked


class Calibration:
    """Survival of a drafter that has no evidence to show, by position and its own confidence.

    `longest` is how many tokens it has been seen to draft.
    """

    def __init__(self, longest: int = 8) -> None:
        self.longest = longest
        self._counts: dict[tuple[int, int], list[float]] = {}
        self._seen = 0

    def curve(self, draft: Draft) -> list[float]:
        places = self._places(draft)
        return list(accumulate((self._hazard(place) for place in places), mul))

    def expected(self) -> list[float]:
        """The curve of a draft that is yet to be made."""
        hazards = []
        for j in range(self.longest):
            places = [self._counts[p] for p in self._counts if p[1] == j]
            accepted, observed = (sum(count[i] for count in places) for i in (0, 1))
            hazards.append(
                (UNKNOWN_WEIGHT * UNKNOWN_HAZARD + accepted) / (UNKNOWN_WEIGHT + observed)
            )
        return list(accumulate(hazards, mul))

    def observe(self, draft: Draft, drafted: int, accepted: int) -> None:
        if not self._seen:
            self.longest = 0
        self._seen += 1
        self.longest = max(self.longest, len(draft.tokens))
        for j, place in enumerate(self._places(draft)[: min(accepted + 1, drafted)]):
            count = self._counts.setdefault(place, [0.0, 0.0])
            count[0] = DECAY * count[0] + (j < accepted)
            count[1] = DECAY * count[1] + 1

    def fade(self) -> None:
        """A drafter that isn't asked is forgotten in time, and so gets another chance."""
        for count in self._counts.values():
            count[0] *= FADE
            count[1] *= FADE

    def _places(self, draft: Draft) -> list[tuple[int, int]]:
        if draft.confidence is None:
            return [(0, j) for j in range(len(draft.tokens))]
        return [(bisect_right(CONFIDENCE_STARTS, q) - 1, j) for j, q in enumerate(draft.confidence)]

    def _hazard(self, place: tuple[int, int]) -> float:
        accepted, observed = self._counts.get(place, (0.0, 0.0))
        return (UNKNOWN_WEIGHT * UNKNOWN_HAZARD + accepted) / (UNKNOWN_WEIGHT + observed)
