"""Several drafters under one chooser, behind the five calls of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlite.drafters.base import Drafter, PlansAlone
from dlite.planner import Chooser, Planner
from dlite.types import Draft, Request, SessionKey, Verdict, View


@dataclass(kw_only=True)
class HybridOptions:
    """`draft` is a draft model's folder or hub id (null: retrieval alone), `corpus` and `priors`
    are those of the survival policy. `costs` is a file of step times; null: they are measured for
    `batch_size` requests and `num_draft` tokens each."""

    draft: str | None = None
    strict: bool = False
    corpus: str | None = None
    priors: str = "shipped"
    costs: str | None = None
    batch_size: int = 1
    num_draft: int = 32

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_draft"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


class Hybrid:
    """Cheap drafters propose, the chooser says whether the neural one (which reads taps) is asked
    as well, and what is verified of all that. A drafter observes only its own drafts.

    Raises ValueError for no drafter at all, two of one name, or two that read taps.
    """

    name = "hybrid"

    def __init__(self, drafters: Sequence[Drafter], chooser: Chooser) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}
        neural = [drafter for drafter in drafters if drafter.tap_ids]
        if not drafters or len(self._drafters) < len(drafters) or len(neural) > 1:
            names = ", ".join(drafter.name for drafter in drafters) or "none"
            raise ValueError(
                f"drafters are {names}; give at least one, each name once, at most one draft model"
            )
        self.cheap = [drafter for drafter in drafters if not drafter.tap_ids]
        self.neural = neural[0] if neural else None
        self.chooser = chooser
        self.alone = drafters[0] if len(drafters) == 1 else None
        self.tap_ids = self.neural.tap_ids if self.neural else ()
        # Of the present round, by request: what all proposed, and whose draft is verified.
        self._proposed: dict[str, dict[str, Draft]] = {}
        self._owner: dict[str, str] = {}

    def start(self, request: Request) -> None:
        for drafter in self._drafters.values():
            drafter.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        planned = self._planned(views)
        if planned is not None:
            return planned
        drafts = {drafter.name: _propose(drafter, views) for drafter in self.cheap}
        neural = self.neural
        if neural is not None and self.chooser.run_neural(neural.name, views, drafts):
            drafts[neural.name] = _propose(neural, views)
        if not drafts:
            return [Draft() for _ in views]
        choices = self.chooser.select(views, drafts)
        for row, (view, choice) in enumerate(zip(views, choices, strict=True)):
            self._proposed[view.request.id] = {name: made[row] for name, made in drafts.items()}
            self._owner[view.request.id] = choice.drafter
        return [choice.draft for choice in choices]

    def _planned(self, views: list[View]) -> list[Draft] | None:
        if isinstance(self.alone, PlansAlone) and isinstance(self.chooser, Planner):
            return self.chooser.within(self.alone, views)
        return None

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        proposed = self._proposed.pop(request.id, None)
        if draft.tokens:
            drafter = self.alone or self._drafters[self._owner[request.id]]
            drafter.observe(request, draft, verdict)
        if proposed is not None:
            self.chooser.observe(request, proposed, draft, verdict)

    def finish(self, request: Request) -> None:
        self._forget(request)
        for drafter in self._drafters.values():
            drafter.finish(request)

    def abort(self, request: Request) -> None:
        self._forget(request)
        for drafter in self._drafters.values():
            drafter.abort(request)

    def _forget(self, request: Request) -> None:
        self._proposed.pop(request.id, None)
        self._owner.pop(request.id, None)
        self.chooser.finish(request)

    def close(self, session: SessionKey) -> None:
        for drafter in self._drafters.values():
            drafter.close(session)


def _propose(drafter: Drafter, views: list[View]) -> list[Draft]:
    """What fits into the views: a drafter may not know how many tokens are of use."""
    return [
        draft.cut(view.max_draft) for draft, view in zip(drafter.propose(views), views, strict=True)
    ]
