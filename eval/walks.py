"""One replay for all batch sizes and seeds.

Where a request's drafts depend on its session alone, so do its rounds: a batch only says which of
them share a step. So the sessions are walked once, one request at a time; a batch then lays the
rounds out in slots, and adds up what its steps cost. In one thing this is not a replay of the
batch: a slot that begins inside a session goes on with what the session's verdicts have taught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlite.costs import CostTable
from eval.rendering import Call
from eval.replay import Replay, shares, shuffled, step_cost
from eval.tally import Cell, Counts, Tally, tally_cells


class Walk:
    """`done` is a replay of `sessions` at batch size 1 under `costs`; its steps are dropped."""

    def __init__(self, sessions: Sequence[Sequence[Call]], done: Replay, costs: CostTable) -> None:
        assert done.batch == 1
        self.sessions, self.costs, self.done = sessions, costs, done
        steps, done.steps = done.steps, []
        self._cells: list[Cell] = []
        places: dict[Cell, int] = {}
        cells = tally_cells(steps)
        self._cell_N = np.array([places.setdefault(cell, len(places)) for cell in cells])
        self._cells = list(places)
        self._drafted_N = np.array([step.round.drafted for step in steps])
        self._emitted_N = np.array([step.round.emitted for step in steps])
        self._accepted_N = np.array([step.round.accepted for step in steps])
        self._neural_N = np.array(  # a draft model took time
            [step.cost > step_cost(costs, 1, 1 + step.round.drafted) for step in steps]
        )
        self._rounds: dict[str, list[int]] = {}
        for place, step in enumerate(steps):
            self._rounds.setdefault(step.call.id, []).append(place)

    def lay_out(self, batch: int, seed: int) -> tuple[Tally, Replay]:
        """What `replay` would give for them, without its steps."""
        calls = shuffled(self.sessions, seed)
        found = [self._rounds.get(call.id, []) for call in calls]
        order_N = np.array([place for places in found for place in places])
        before = np.cumsum([0, *map(len, found)])
        firsts, owns = [], []
        for first, num_own in shares(calls, batch):
            firsts.append(before[first])
            owns.append(before[min(first + num_own, len(calls))] - before[first])
        slots_B1, own_B1 = np.array(firsts)[:, None], np.array(owns)[:, None]
        step_S = np.arange(max(owns))
        row_BS = order_N[(slots_B1 + step_S) % len(order_N)]
        drafted_S = self._drafted_N[row_BS].sum(0)
        cost_S = self.costs.step_seconds(batch, batch + int(drafted_S.max()))[drafted_S]
        cost_S = cost_S + self._neural_N[row_BS].any(0) * self.costs.draft_seconds(batch)
        cost_N = np.zeros(len(order_N))
        counted_BS = step_S < own_B1
        cost_N[row_BS[counted_BS]] = np.broadcast_to(cost_S / batch, row_BS.shape)[counted_BS]
        share = batch * len(step_S) / len(order_N)
        seconds = self.done.draft_seconds * share
        done = replace(self.done, batch=batch, drafted=drafted_S.tolist(), draft_seconds=seconds)
        return self._tally(cost_N), done

    def _tally(self, cost_N: np.ndarray) -> Tally:
        drafting_N = self._drafted_N > 0
        columns = [
            np.bincount(self._cell_N, weights, minlength=len(self._cells))
            for weights in (
                np.ones(len(cost_N)),
                self._emitted_N,
                self._drafted_N,
                self._accepted_N,
                drafting_N,
                drafting_N * self._emitted_N,
                cost_N,
            )
        ]
        return {
            cell: Counts(*map(int, row[:-1]), cost=row[-1])
            for cell, row in zip(self._cells, np.array(columns).T.tolist(), strict=True)
        }
