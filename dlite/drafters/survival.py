"""The candidate that promises most, whichever corpus it comes from, and how far it can be trusted.

Not in the papers: their rules compare match lengths, with a margin for the static corpus, and fix a
length by the match. Here every candidate has a survival curve, and only the expected number of
accepted tokens is compared.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import neg
from typing import TYPE_CHECKING

from dlite.drafters.memory import Memory, MemoryOptions, Seen
from dlite.survival import LONGEST, Prior, Survival, cell_of, native_survival
from dlite.types import Draft, Request, SessionKey, SourceClass, Verdict, View

if TYPE_CHECKING:
    import numpy as np


@dataclass(kw_only=True)
class SurvivalOptions(MemoryOptions):
    """`corpus` is the static corpus' folder. A draft ends where its survival falls under
    `threshold`, the price of a verified token; 0 leaves that to a planner. `priors` is a file
    of `python -m eval.profile`, or `shipped`."""

    corpus: str | None = None
    threshold: float = 0.0
    priors: str = "shipped"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; give a number in [0, 1)")


class SurvivalDrafter:
    """What a session's verdicts teach stays in the session, for greedy and sampled calls apart."""

    name = "survival"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, memory: Memory, options: SurvivalOptions, prior: Prior) -> None:
        self.memory, self.options, self.prior = memory, options, prior

    def start(self, request: Request) -> None:
        self.memory.start(request)
        call = self.memory.call(request)
        assert call is not None
        key, learnt = (self.name, request.sampling.greedy), call.session.learnt
        if key not in learnt:
            make = native_survival if self.memory.native else Survival
            learnt[key] = make(self.prior)
        call.learn(learnt[key])

    def propose(self, views: list[View]) -> list[Draft]:
        if self.memory.native:
            return self.memory.native_drafts(views, -1, self.options.threshold, "none")
        seen = self.memory.look(views)
        return [self._draft(view, one) for view, one in zip(views, seen, strict=True)]

    def propose_within(
        self, views: list[View], seconds_N: np.ndarray, guard: float
    ) -> list[Draft] | None:
        """As `propose`, cut by `dlite.slots.plan`; None without the native extension."""
        if not self.memory.native:
            return None
        threshold = self.options.threshold
        return self.memory.native_drafts(views, -1, threshold, "none", seconds_N, guard)

    def _draft(self, view: View, seen: Seen) -> Draft:
        call = seen.call
        if call is None:
            return Draft(source="none")
        learnt: Survival = call.survival
        best, promised, curve = -1, 0.0, None
        for place, found in enumerate(seen.found):
            if found.match_length == 0:
                continue
            source = call.source_class(call.origins[place], found)
            its = learnt.of(cell_of(source, found.match_length, found.support, found.votes))
            promise = its.expected[min(len(found.tokens), view.max_draft, LONGEST)]
            if promise > promised:
                best, promised, curve = place, promise, its.survival
        if curve is None:
            return Draft(source="none")
        length = min(len(seen.found[best].tokens), view.max_draft, LONGEST)
        if self.options.threshold:
            length = min(length, bisect_right(curve, -self.options.threshold, key=neg))
        draft = self.memory.draft(call, best, seen.found[best], length)
        draft.survival = curve[:length]
        return draft

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        call, evidence = self.memory.call(request), draft.evidence
        if call is None or evidence is None:
            return
        call.survival.observe(evidence, len(draft.tokens), verdict.num_accepted)
        if evidence.source is SourceClass.WORKSPACE:
            self.memory.observe(request, draft, verdict)

    def finish(self, request: Request) -> None:
        self.memory.finish(request)

    def abort(self, request: Request) -> None:
        self.memory.abort(request)

    def close(self, session: SessionKey) -> None:
        self.memory.close(session)
