"""Recorded sessions replayed through a drafter: what it would have drafted, and how much of that
the recorded output accepts.

The recorded text is the truth, as a greedy target would write it again (teacher forcing). The
first token of a call belongs to its prefill; tools and prefills take no time here.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from dlite.drafters.base import Drafter
from dlite.types import AgentContext, Draft, Request, Round, SessionKey, Verdict, View
from eval.rendering import Call

MAX_DRAFT = 32


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of a target step over `num_tokens` positions of `batch` requests, in units of a step
    that is bound by memory: `max(1, num_tokens / ridge) + slope * num_tokens`."""

    ridge: float = 256.0
    slope: float = 0.0005

    def step(self, num_tokens: int) -> float:
        return max(1.0, num_tokens / self.ridge) + self.slope * num_tokens


@dataclass(slots=True)
class Step:
    """One round of one request, and its share of the batch's time."""

    call: Call
    round: Round
    cost: float


@dataclass(slots=True)
class Replay:
    """`steps` cover every token of every call once. `draft_seconds` is the wall-clock of
    `num_batches` proposals and of what the drafter learnt from their verdicts."""

    batch: int
    steps: list[Step] = field(default_factory=list)
    num_batches: int = 0
    draft_seconds: float = 0.0


class Slot:
    """A place in the batch. It runs `calls` in a circle from number `first`; the first `num_own`
    of them are its share, what it runs after them only keeps the batch full."""

    def __init__(self, tenant: str, calls: Sequence[Call], first: int, num_own: int) -> None:
        self.tenant, self.calls, self.at, self.left = tenant, calls, first, num_own
        self.request: Request
        self.tokens: list[int]
        self.done = 0  # output tokens so far

    @property
    def call(self) -> Call:
        return self.calls[self.at]

    @property
    def num_left(self) -> int:
        return len(self.call.output) - self.done

    def begin(self, drafter: Drafter, end_id: int) -> None:
        """Lets the drafter see what the session's earlier calls wrote, then starts the call."""
        first = self.at
        while first and self.calls[first - 1].session == self.call.session:
            first -= 1
        for earlier in self.calls[first : self.at]:
            request = _request(earlier, self.tenant, end_id)
            drafter.start(request)
            if len(earlier.output) > 1:
                tokens = [*request.prompt, *earlier.output[:-1]]
                drafter.propose([View(request, tokens, 1)])
                tokens.append(earlier.output[-1])
                drafter.observe(request, Draft(), Verdict(0, tokens[-1]))
            drafter.finish(request)
        self.start(drafter, end_id)

    def start(self, drafter: Drafter, end_id: int) -> None:
        """Starts the next call that has a round."""
        while True:
            self.request = _request(self.call, self.tenant, end_id)
            drafter.start(self.request)
            self.tokens = [*self.request.prompt, self.call.output[0]]
            self.done = 1
            if self.num_left:
                return
            self.end(drafter)

    def end(self, drafter: Drafter) -> None:
        drafter.finish(self.request)
        session = self.call.session
        self.at = (self.at + 1) % len(self.calls)
        self.left -= 1
        if self.call.session != session or self.at == 0:
            assert self.request.session
            drafter.close(self.request.session)

    def verify(self, draft: Draft) -> tuple[Verdict, Round]:
        """Commits what the recorded output accepts of the draft, and its next token."""
        output, done, drafted = self.call.output, self.done, len(draft.tokens)
        accepted = 0
        for token, truth in zip(draft.tokens, output[done : done + drafted], strict=False):
            if token != truth:
                break
            accepted += 1
        after = output[done : done + accepted + 1]
        self.tokens += after
        self.done += len(after)
        return Verdict(accepted, after[-1]), Round(
            self.call.id, drafted, accepted, len(after), self.num_left == 0, draft.source
        )


def _request(call: Call, tenant: str, end_id: int) -> Request:
    return Request(
        id=f"{tenant} {call.id}",
        prompt=call.prompt(),
        max_new_tokens=len(call.output),
        stop_ids=frozenset((end_id,)),
        session=SessionKey(tenant, call.session),
        agent=AgentContext(agent_id=call.agent, query_id=call.scope, files=call.files),
    )


def shares(sessions: Sequence[Sequence[Call]], batch: int, seed: int) -> list[Slot]:
    """The sessions shuffled and laid end to end, cut between calls into `batch` shares of about as
    many tokens."""
    order = list(sessions)
    Random(seed).shuffle(order)
    calls = [call for session in order for call in session]
    total = sum(len(call.output) for call in calls)
    owner, before = [], 0
    for call in calls:
        owner.append(before * batch // total)
        before += len(call.output)
    return [
        Slot(f"slot{slot}", calls, bisect_left(owner, slot) % len(calls), owner.count(slot))
        for slot in range(batch)
    ]


def replay(
    sessions: Sequence[Sequence[Call]],
    drafter: Drafter,
    *,
    end_id: int,
    batch: int = 1,
    seed: int = 0,
    max_draft: int = MAX_DRAFT,
    cost: CostModel = CostModel(),
    drafting_cost: Callable[[], float] = float,
    on_tokens: Callable[[int], object] | None = None,
) -> Replay:
    """Every call once, `batch` requests at a time; a slot that is through with its share goes on,
    uncounted, until all are. `drafting_cost` says what the last proposals took, in the cost
    model's units; `on_tokens` is told how many tokens each counted round emitted."""
    result = Replay(batch)
    slots = shares(sessions, batch, seed)
    for slot in slots:
        slot.begin(drafter, end_id)
    while any(slot.left > 0 for slot in slots):
        start = time.perf_counter()
        views = [View(slot.request, slot.tokens, max_draft) for slot in slots]
        drafts = drafter.propose(views)
        drafted = time.perf_counter()
        num_tokens = sum(len(draft.tokens) for draft in drafts)
        share = (cost.step(batch + num_tokens) + drafting_cost()) / batch
        verdicts = []
        for slot, draft in zip(slots, drafts, strict=True):
            verdict, done = slot.verify(draft)
            verdicts.append(verdict)
            if slot.left > 0:
                result.steps.append(Step(slot.call, done, share))
                if on_tokens:
                    on_tokens(done.emitted)
        verified = time.perf_counter()
        for slot, draft, verdict in zip(slots, drafts, verdicts, strict=True):
            drafter.observe(slot.request, draft, verdict)
        result.draft_seconds += drafted - start + time.perf_counter() - verified
        result.num_batches += 1
        for slot in slots:
            if not slot.num_left:
                slot.end(drafter)
                slot.start(drafter, end_id)
    for slot in slots:
        drafter.abort(slot.request)
    return result
