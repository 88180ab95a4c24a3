"""Recorded sessions replayed through a drafter: what it would have drafted, and how much of that
the recorded output accepts.

The recorded text is the truth, as a greedy target would write it again (teacher forcing). The
first token of a call belongs to its prefill; tools and prefills take no time here.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from dlite.costs import CostTable
from dlite.drafters.base import Drafter
from dlite.drafters.structure import Structure
from dlite.types import AgentContext, Draft, Request, Round, SessionKey, Verdict, View
from eval.rendering import Call

MAX_DRAFT = 32


@dataclass(slots=True)
class Step:
    """One round of one request, and its share of the batch's time."""

    call: Call
    round: Round
    cost: float


@dataclass(slots=True)
class Replay:
    """`steps` cover every token of every call once. `drafted` are the tokens that each batch
    verified beside its anchors, `draft_seconds` the wall-clock of all proposals and of what the
    drafter learnt from their verdicts. `predicted` are the survivals of all drafts that have them,
    one draft after the other, `judged` how many tokens each has and how many were accepted."""

    batch: int
    steps: list[Step] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    predicted: array[float] = field(default_factory=lambda: array("d"))
    judged: list[tuple[int, int]] = field(default_factory=list)


class Slot:
    """A place in the batch. It runs `calls` in a circle from number `first`; the first `num_own`
    of them are its share, what it runs after them only keeps the batch full."""

    def __init__(
        self, calls: Sequence[Call], first: int, num_own: int, request: Callable[[Call], Request]
    ) -> None:
        self.calls, self.at, self.left, self._request = calls, first, num_own, request
        self.request: Request
        self.tokens: list[int]
        self.done = 0  # output tokens so far

    @property
    def call(self) -> Call:
        return self.calls[self.at]

    @property
    def num_left(self) -> int:
        return len(self.call.output) - self.done

    def begin(self, drafter: Drafter) -> None:
        """Lets the drafter see what the session's earlier calls wrote, then starts the call."""
        first = self.at
        while first and self.calls[first - 1].session == self.call.session:
            first -= 1
        for earlier in self.calls[first : self.at]:
            request = self._request(earlier)
            drafter.start(request)
            if len(earlier.output) > 1:
                tokens = [*request.prompt, *earlier.output[:-1]]
                drafter.propose([View(request, tokens, 0)])
                tokens.append(earlier.output[-1])
                drafter.observe(request, Draft(), Verdict(0, tokens[-1]))
            drafter.finish(request)
        self.start(drafter)

    def start(self, drafter: Drafter) -> None:
        """Starts the next call that has a round."""
        while True:
            self.request = self._request(self.call)
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


def shuffled(sessions: Sequence[Sequence[Call]], seed: int) -> list[Call]:
    order = list(sessions)
    Random(seed).shuffle(order)
    return [call for session in order for call in session]


def shares(calls: Sequence[Call], batch: int) -> list[tuple[int, int]]:
    """Number of the first call and how many calls, of `batch` shares of about as many tokens."""
    total = sum(len(call.output) for call in calls)
    owner, before = [], 0
    for call in calls:
        owner.append(before * batch // total)
        before += len(call.output)
    return [(bisect_left(owner, k) % len(calls), owner.count(k)) for k in range(batch)]


def make_request(
    call: Call, *, tenant: str, end_id: int, structure: Structure | None = None
) -> Request:
    return Request(
        id=f"{tenant} {call.id}",
        prompt=call.prompt(),
        max_new_tokens=len(call.output),
        stop_ids=frozenset((end_id,)),
        session=SessionKey(tenant, call.session),
        agent=AgentContext(call.agent, call.scope, structure, call.files),
    )


def step_cost(costs: CostTable, batch: int, num_tokens: int) -> float:
    return float(costs.step_seconds(batch, num_tokens)[-1])


def replay(
    sessions: Sequence[Sequence[Call]],
    drafter: Drafter,
    *,
    costs: CostTable,
    end_id: int,
    batch: int = 1,
    seed: int = 0,
    max_draft: int = MAX_DRAFT,
    structure: Structure | None = None,
    drafting_cost: Callable[[], float] = float,
    on_tokens: Callable[[int], object] | None = None,
) -> Replay:
    """Every call once, `batch` requests at a time.

    The sessions are shuffled and laid end to end, and each slot gets a share of the calls. A slot
    that is through goes on, uncounted, until all are. `drafting_cost` says what the last proposals
    took, in the units of `costs`; `on_tokens` is told how many tokens each counted round emitted.
    """
    result = Replay(batch)
    calls = shuffled(sessions, seed)
    slots = []
    for number, (first, num_own) in enumerate(shares(calls, batch)):
        request = partial(make_request, tenant=f"slot{number}", end_id=end_id, structure=structure)
        slots.append(Slot(calls, first, num_own, request))
    for slot in slots:
        slot.begin(drafter)
    drafting_cost()  # of what came before the first step
    while any(slot.left > 0 for slot in slots):
        start = time.perf_counter()
        views = [View(slot.request, slot.tokens, max_draft) for slot in slots]
        drafts = drafter.propose(views)
        drafted = time.perf_counter()
        num_tokens = sum(len(draft.tokens) for draft in drafts)
        share = (step_cost(costs, batch, batch + num_tokens) + drafting_cost()) / batch
        verdicts = []
        for slot, draft in zip(slots, drafts, strict=True):
            verdict, done = slot.verify(draft)
            verdicts.append(verdict)
            if slot.left > 0:
                result.steps.append(Step(slot.call, done, share))
                if draft.survival:
                    result.predicted.extend(draft.survival)
                    result.judged.append((len(draft.survival), done.accepted))
                if on_tokens:
                    on_tokens(done.emitted)
        verified = time.perf_counter()
        for slot, draft, verdict in zip(slots, drafts, verdicts, strict=True):
            drafter.observe(slot.request, draft, verdict)
        result.draft_seconds += drafted - start + time.perf_counter() - verified
        result.drafted.append(num_tokens)
        for slot in slots:
            if not slot.num_left:
                slot.end(drafter)
                slot.start(drafter)
    for slot in slots:
        drafter.abort(slot.request)
    return result
