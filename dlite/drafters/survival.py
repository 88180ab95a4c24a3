"""The candidate that promises most, whichever corpus it comes from, and how far it can be trusted.

Not in the papers: their rules compare match lengths, with a margin for the static corpus, and fix a
length by the match. Here every candidate has a survival curve, and only the expected number of
accepted tokens is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlite.drafters.memory import Memory, MemoryOptions, Seen
from dlite.survival import Prior, Survival
from dlite.types import Draft, Request, SessionKey, Verdict, View


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

    def propose(self, views: list[View]) -> list[Draft]:
        seen = self.memory.look(views)
        return [self._draft(view, one) for view, one in zip(views, seen, strict=True)]

    def _draft(self, view: View, seen: Seen) -> Draft:
        best, promised = Draft(source="none"), 0.0
        learnt = self._learnt(view.request)
        if learnt is None:
            return best
        for draft in self.memory.drafts(view, seen):
            assert draft.evidence is not None
            draft.survival = learnt.curve(draft.evidence, len(draft.tokens))
            promise = sum(draft.survival)
            if promise > promised:
                best, promised = draft, promise
        least = self.options.threshold
        return best.cut(sum(s >= least for s in best.survival)) if best.survival else best

    def _learnt(self, request: Request) -> Survival | None:
        session = self.memory.session(request)
        if session is None:
            return None
        key = self.name, request.sampling.greedy
        if key not in session.learnt:
            session.learnt[key] = Survival(self.prior)
        return session.learnt[key]

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.memory.observe(request, draft, verdict)
        learnt = self._learnt(request)
        if learnt is not None and draft.evidence is not None:
            learnt.observe(draft.evidence, len(draft.tokens), verdict.num_accepted)

    def finish(self, request: Request) -> None:
        self.memory.finish(request)

    def abort(self, request: Request) -> None:
        self.memory.abort(request)

    def close(self, session: SessionKey) -> None:
        self.memory.close(session)
