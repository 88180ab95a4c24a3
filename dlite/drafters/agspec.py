"""AgSpec (summary of the paper): session, workspace and static corpora, and a length that adapts.

What the summary leaves open is decided here: the values of lambda and eta, no draft without a
match, halves rounded up, m bounded by the cap, alpha within limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlite.drafters.length import Caps, Scale
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.types import Draft, Request, SessionKey, Verdict, View

DELTA = 5  # tokens by which the static corpus must match longer


@dataclass(kw_only=True)
class AgSpecOptions(MemoryOptions):
    """`corpus` is the static corpus' folder. `lam` is lambda, the acceptance at which one more
    token pays; `eta` the scale's step; `caps` a file of profiled caps, or `none`; `num_draft` a
    fixed length (0: adapted); `online` off leaves the scale at 1. The rules are the paper's."""

    live_rule: str = "vote"
    workspace_rule: str = "first"
    static_rule: str = "vote"
    corpus: str | None = None
    delta: int = DELTA
    lam: float = 0.3
    eta: float = 0.05
    caps: str = "none"
    num_draft: int = 0
    online: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lam < 1:
            raise ValueError(f"lam is {self.lam}; give a number between 0 and 1")
        for name in ("delta", "eta", "num_draft"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 0")


class AgSpecDrafter:
    name = "agspec"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, memory: Memory, options: AgSpecOptions) -> None:
        self.memory, self.options = memory, options
        self.caps = Caps.load(options.caps)
        self._asked: dict[str, int] = {}

    def start(self, request: Request) -> None:
        self.memory.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = self.memory.propose(views, delta=self.options.delta)
        for view, draft in zip(views, drafts, strict=True):
            if draft.evidence is not None:
                del draft.tokens[self._length(view.request, draft.evidence.match_length) :]
        return drafts

    def _length(self, request: Request, match_length: int) -> int:
        asked = self.options.num_draft or self._scale(request).length(
            match_length, self.caps.of(request.agent.agent_id)
        )
        self._asked[request.id] = asked
        return asked

    def _scale(self, request: Request) -> Scale:
        session = self.memory.session(request)
        assert session is not None, "only a call with a session has matches"
        return session.learnt.setdefault(request.agent.agent_id, Scale())

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.memory.observe(request, draft, verdict)
        asked = self._asked.pop(request.id, 0)
        adapts = self.options.online and not self.options.num_draft
        if adapts and draft.tokens and self.memory.session(request) is not None:
            self._scale(request).observe(
                len(draft.tokens),
                verdict.num_accepted,
                asked,
                self.caps.of(request.agent.agent_id),
                target=1 - self.options.lam,
                rate=self.options.eta,
            )

    def finish(self, request: Request) -> None:
        self._asked.pop(request.id, None)
        self.memory.finish(request)

    def abort(self, request: Request) -> None:
        self._asked.pop(request.id, None)
        self.memory.abort(request)

    def close(self, session: SessionKey) -> None:
        self.memory.close(session)
