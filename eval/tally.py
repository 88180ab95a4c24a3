"""Sums over replayed rounds, by session and by what a call was, and the figures made of them.

The figures are those of `eval.metrics`, which makes them from the rounds themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlite.costs import CostTable
from eval.rendering import Call
from eval.replay import Replay, Step, step_cost

TURNS = ((1, 3), (4, 10), (11, 30), (31, None))


class Cell(NamedTuple):
    """What rounds have in common."""

    session: str
    group: str
    agent: str
    turns: str
    edits: bool
    source: str


@dataclass(slots=True)
class Counts:
    """`drafting_*` count the rounds that drafted at least one token."""

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    drafting_rounds: int = 0
    drafting_emitted: int = 0
    cost: float = 0.0

    def __iadd__(self, other: Counts) -> Counts:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.rounds

    @property
    def accept_length(self) -> float | None:
        return self.drafting_emitted / self.drafting_rounds if self.drafting_rounds else None

    @property
    def rejection_rate(self) -> float | None:
        return 1 - self.accepted / self.drafted if self.drafted else None

    def goodput_vs_plain(self, batch: int, costs: CostTable) -> float:
        """Tokens per time, over those of a batch that drafts nothing."""
        return self.emitted / self.cost * step_cost(costs, batch, batch) / batch


Tally = dict[Cell, Counts]


def turns_of(turn: int) -> str:
    for low, high in TURNS:
        if high is None or turn <= high:
            return f"{low}-{high}" if high else f"{low}+"
    raise AssertionError


def tally_cells(steps: Iterable[Step]) -> list[Cell]:
    """Of each step."""
    names: dict[str, Cell] = {}
    cells = []
    for step in steps:
        key = f"{step.call.id} {step.round.source}"
        if key not in names:
            names[key] = _cell(step.call, step.round.source)
        cells.append(names[key])
    return cells


def tally(replay: Replay) -> Tally:
    cells: Tally = {}
    for step, cell in zip(replay.steps, tally_cells(replay.steps), strict=True):
        done, counts = step.round, cells.setdefault(cell, Counts())
        counts.rounds += 1
        counts.emitted += done.emitted
        counts.drafted += done.drafted
        counts.accepted += done.accepted
        counts.cost += step.cost
        if done.drafted:
            counts.drafting_rounds += 1
            counts.drafting_emitted += done.emitted
    return cells


def _cell(call: Call, source: str) -> Cell:
    return Cell(call.session, call.group, call.agent, turns_of(call.turn), call.edits, source)


def total(cells: Iterable[Counts]) -> Counts:
    counts = Counts()
    for cell in cells:
        counts += cell
    return counts


def merge(tallies: Iterable[Tally]) -> Tally:
    merged: Tally = {}
    for cells in tallies:
        for cell, counts in cells.items():
            merged.setdefault(cell, Counts())
            merged[cell] += counts
    return merged


def grouped(cells: Tally, by: Callable[[Cell], str]) -> dict[str, Tally]:
    groups: dict[str, Tally] = {}
    for cell, counts in cells.items():
        groups.setdefault(by(cell), {})[cell] = counts
    return dict(sorted(groups.items(), key=lambda item: natural(item[0])))


def natural(name: str) -> list[str | int]:
    """Sorts 4-10 before 11-30."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def ci95(
    cells: Mapping[Cell, Counts], *, seed: int = 0, num_resamples: int = 2000
) -> tuple[float, float]:
    """95 % confidence interval of tokens per step: percentile bootstrap that draws whole
    sessions."""
    sessions = [total(found.values()) for found in grouped(dict(cells), _session).values()]
    table_N2 = np.array([(s.emitted, s.rounds) for s in sessions], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(sessions), size=(num_resamples, len(sessions)))
    emitted, rounds = table_N2[picks].sum(1).T
    low, high = np.quantile(emitted / rounds, [0.025, 0.975])
    return float(low), float(high)


def mean_over_sessions(cells: Tally) -> float:
    """Tokens per step of each session, averaged: short sessions weigh as much as long ones."""
    sessions = grouped(cells, _session).values()
    return float(np.mean([total(found.values()).tokens_per_step for found in sessions]))


def _session(cell: Cell) -> str:
    return cell.session


@dataclass(frozen=True, slots=True)
class Bin:
    """Draft tokens of about the same predicted survival: its mean, and the share that survived."""

    count: int
    predicted: float
    actual: float


def calibration(replays: Iterable[Replay], num_bins: int = 20) -> list[Bin]:
    """Over all verified tokens of drafts that predicted their survival."""
    counts, predicted, actual = np.zeros((3, num_bins))
    for replay in replays:
        survival_N = np.array(replay.predicted)
        lengths, accepted = np.array(replay.judged or [(0, 0)]).T
        starts = np.repeat(lengths.cumsum() - lengths, lengths)
        survived_N = np.arange(len(survival_N)) - starts < np.repeat(accepted, lengths)
        place_N = np.minimum((survival_N * num_bins).astype(int), num_bins - 1)
        counts += np.bincount(place_N, minlength=num_bins)
        predicted += np.bincount(place_N, survival_N, minlength=num_bins)
        actual += np.bincount(place_N, survived_N, minlength=num_bins)
    return [
        Bin(int(n), float(p / n), float(a / n))
        for n, p, a in zip(counts, predicted, actual, strict=True)
        if n
    ]


def read_summaries(folders: Sequence[str]) -> list[dict[str, Any]]:
    """What `eval.simulate` wrote into each folder. Raises ValueError where it did not."""
    summaries = []
    for name in folders:
        path = Path(name) / "summary.json"
        if not path.is_file():
            raise ValueError(f"no result file {path}; give folders that eval.simulate wrote")
        summaries.append(json.loads(path.read_text()))
    return summaries
