"""One budget for all drafters: of all (request, position) slots those that are worth their time.

No paper has it for drafts of several sources: retrieval and a draft model compete by survival
alone. The arithmetic is in `slots.py`.

Only point masses are planned. Their tokens follow from the past, so no choice can depend on a token
that is yet to be drawn, and the output stays the target's own (docs/concepts.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from dlite.costs import CostTable
from dlite.slots import Curve
from dlite.survival import Calibration
from dlite.types import Choice, Draft, Request, Verdict, View

if TYPE_CHECKING:
    from dlite.drafters.base import PlansAlone
    from dlite.slots import plan
else:
    try:
        from dlite.retrieval._native import plan
    except ImportError:
        from dlite.slots import plan


class Chooser(Protocol):
    """What decides in a loop of several drafters: a `Planner`, or a paper's `Budget`."""

    def run_neural(
        self, name: str, views: Sequence[View], drafts: Mapping[str, list[Draft]]
    ) -> bool:
        """Whether drafter `name` is asked at all, given what the others propose."""
        ...

    def select(self, views: Sequence[View], drafts: Mapping[str, list[Draft]]) -> list[Choice]:
        """One cut draft per view out of `drafts[drafter][view]`."""
        ...

    def observe(
        self, request: Request, proposed: Mapping[str, Draft], draft: Draft, verdict: Verdict
    ) -> None: ...

    def finish(self, request: Request) -> None: ...


class Planner:
    """Takes the drafts and cuts with the most expected tokens per second.

    `costs` None: verifying is free, so each request gets the draft that promises most, uncut.
    Nothing is drafted for a gain up to `guard`; a neural drafter isn't run for one up to
    `launch_gain`. A draft that comes without survival is judged by its drafter's record.
    """

    def __init__(
        self, costs: CostTable | None = None, *, guard: float = 0.03, launch_gain: float = 0.02
    ) -> None:
        self.costs, self.guard, self.launch_gain = costs, guard, launch_gain
        self._records: dict[tuple[str, bool], Calibration] = {}  # by drafter, greedy or sampled
        self._drafting_seconds = 0.0  # what the neural drafter took in this step

    def run_neural(
        self, name: str, views: Sequence[View], drafts: Mapping[str, list[Draft]]
    ) -> bool:
        if self.costs is None:
            return True
        records = {view.request.sampling.greedy: self._record(name, view) for view in views}
        expected = {greedy: record.expected() for greedy, record in records.items()}
        options = self._options(views, drafts)
        _, without = self._plan(options, 0.0)
        for view, curves in zip(views, options, strict=True):
            curves.append(expected[view.request.sampling.greedy][: view.max_draft])
        seconds = self.costs.draft_seconds(len(views))
        _, with_it = self._plan(options, seconds)
        if with_it <= (1 + self.launch_gain) * without:
            for record in records.values():
                record.fade()
            return False
        self._drafting_seconds = seconds
        return True

    def select(self, views: Sequence[View], drafts: Mapping[str, list[Draft]]) -> list[Choice]:
        names, options = list(drafts), self._options(views, drafts)
        if self.costs is None:
            picks = [_most_promising(curves) for curves in options]
        else:
            picks, _ = self._plan(options, self._drafting_seconds)
        self._drafting_seconds = 0.0
        return [
            Choice(names[option], drafts[names[option]][row].cut(length))
            for row, (option, length) in enumerate(picks)
        ]

    def within(self, drafter: PlansAlone, views: list[View]) -> list[Draft] | None:
        """What `select` would take of this drafter's drafts if it is the only one; None where the
        drafter can't say by itself."""
        if self.costs is None:
            return None
        most = len(views) + sum(view.max_draft for view in views)
        return drafter.propose_within(views, self.costs.step_seconds(len(views), most), self.guard)

    def _options(
        self, views: Sequence[View], drafts: Mapping[str, list[Draft]]
    ) -> list[list[Curve]]:
        options: list[list[Curve]] = [[] for _ in views]
        for name, made in drafts.items():
            for view, draft, curves in zip(views, made, options, strict=True):
                assert draft.probs_KV is None, (
                    "a sampled draft's length is chosen before it is drawn"
                )
                if draft.survival is None:
                    curves.append(self._record(name, view).curve(draft))
                else:
                    curves.append(draft.survival)
        return options

    def _plan(
        self, options: list[list[Curve]], drafting_seconds: float
    ) -> tuple[list[tuple[int, int]], float]:
        assert self.costs is not None
        batch = len(options)
        most = batch + sum(max(map(len, curves), default=0) for curves in options)
        seconds_N = self.costs.step_seconds(batch, most) + drafting_seconds
        return plan(options, seconds_N, self.guard)

    def _record(self, name: str, view: View) -> Calibration:
        key = name, view.request.sampling.greedy
        if key not in self._records:
            self._records[key] = Calibration()
        return self._records[key]

    def observe(
        self, request: Request, proposed: Mapping[str, Draft], draft: Draft, verdict: Verdict
    ) -> None:
        """Every proposal learns from what was emitted, verified or not: these are the target's own
        tokens, and a point mass is accepted where it agrees with them."""
        emitted = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
        for name, other in proposed.items():
            if other.survival is None and other.tokens:
                known = list(zip(other.tokens, emitted, strict=False))
                agreed = next((j for j, (a, b) in enumerate(known) if a != b), len(known))
                key = name, request.sampling.greedy
                self._records[key].observe(other, len(known), agreed)

    def finish(self, request: Request) -> None:
        pass


def _most_promising(curves: Sequence[Curve]) -> tuple[int, int]:
    option = max(range(len(curves)), key=lambda i: sum(curves[i]))
    return option, len(curves[option])
