"""The requests of an engine as drafters know them: what `dlite.decode` does, one step at a time.

Knows nothing of vLLM. The engine says what each step committed; the answer is what to verify next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dlite.drafters.base import Drafter
from dlite.metadata import Metadata
from dlite.types import Draft, Request, SessionKey, Verdict, View
from dlite.vllm_plugin.counters import Counters
from dlite.vllm_plugin.options import PLAIN


@dataclass(frozen=True, slots=True)
class Step:
    """What an engine step did for one request: `sampled` tokens were committed (none: a part of a
    prompt was read), `num_verified` draft tokens judged."""

    id: str
    sampled: list[int]
    num_verified: int


@dataclass(slots=True)
class Call:
    """`tokens` are prompt + committed, the very list that drafters hold."""

    request: Request
    metadata: Metadata
    ends_with: Callable[[list[int]], bool]  # does this output end by a stop string?
    max_length: int
    tokens: list[int] = field(default_factory=list)
    draft: Draft = field(default_factory=Draft)
    done: bool = False

    def commit(self, sampled: list[int]) -> None:
        """Appends up to the first stop token, and no more than were asked for."""
        end = len(self.request.prompt) + self.request.max_new_tokens
        for token in sampled:
            self.tokens.append(token)
            if token in self.request.stop_ids or len(self.tokens) >= min(end, self.max_length):
                self.done = True
                return

    @property
    def max_draft(self) -> int:
        """How many draft tokens can be committed beside the target's own."""
        end = len(self.request.prompt) + self.request.max_new_tokens
        return 0 if self.done else min(end, self.max_length) - len(self.tokens) - 1

    @property
    def complete(self) -> bool:
        """Whether it ended by itself. vLLM ends one at a stop string as it does an aborted one."""
        return self.done or self.ends_with(self.tokens[len(self.request.prompt) :])


class Calls:
    """`drafters` by name; requests that name none get the first. `tap_ids`: the layers whose
    states `step` is given, ascending."""

    def __init__(
        self, drafters: Mapping[str, Drafter], num_draft: int, counters: Counters | None = None
    ) -> None:
        self.drafters = dict(drafters)
        self.num_draft = num_draft
        self.counters = counters or Counters()
        self.ridge_tokens = 0  # 0: not measured
        self.tap_ids = tuple(sorted({k for d in drafters.values() for k in d.tap_ids}))
        self._default = next(iter(drafters), PLAIN)
        self._calls: dict[str, Call] = {}

    def start(self, call: Call) -> None:
        request = call.request
        if request.id in self._calls:
            return
        call.tokens = list(request.prompt)
        self._calls[request.id] = call
        if drafter := self._drafter(call):
            drafter.start(request)

    def _name(self, call: Call) -> str:
        return call.metadata.drafter or self._default

    def _drafter(self, call: Call) -> Drafter | None:
        return self.drafters.get(self._name(call))

    def wants_taps(self, step: Step) -> bool:
        call = self._calls.get(step.id)
        drafter = self._drafter(call) if call and step.sampled else None
        return drafter is not None and bool(drafter.tap_ids)

    def step(
        self, steps: Sequence[Step], taps_LD: Mapping[str, Tensor] | None = None
    ) -> list[Draft]:
        """A draft per step, empty where none is wanted. `taps_LD` by request, layers in `tap_ids`
        order, at the position before its new anchor."""
        for step in steps:
            self._judge(step)
        wanted: dict[str, list[Call]] = {}
        for step in steps:
            call = self._calls.get(step.id)
            if call and step.sampled and call.max_draft > 0 and self._drafter(call):
                wanted.setdefault(self._name(call), []).append(call)
        for name, calls in wanted.items():
            self._propose(name, calls, taps_LD or {})
        drafts = [self.draft_of(step.id) if step.sampled else Draft() for step in steps]
        if self.ridge_tokens:
            used = sum(len(draft.tokens) for draft in drafts)
            self.counters.budget(max(0, self.ridge_tokens - len(steps)), used)
        self.counters.flush()
        return drafts

    def _judge(self, step: Step) -> None:
        call = self._calls.get(step.id)
        if call is None or not step.sampled:
            return
        first = len(call.tokens) == len(call.request.prompt)
        draft, call.draft = call.draft.cut(step.num_verified), Draft()
        if not first:
            verdict = Verdict(len(step.sampled) - 1, step.sampled[-1])
            if drafter := self._drafter(call):
                drafter.observe(call.request, draft, verdict)
            self.counters.judged(call.request.agent.agent_id, draft, verdict.num_accepted)
        call.commit(step.sampled)

    def _propose(self, name: str, calls: list[Call], taps_LD: Mapping[str, Tensor]) -> None:
        drafter = self.drafters[name]
        index = [self.tap_ids.index(k) for k in drafter.tap_ids]
        views = [
            View(
                call.request,
                call.tokens,
                min(self.num_draft, call.max_draft),
                taps_LD[call.request.id][index] if index else None,
            )
            for call in calls
        ]
        start = time.perf_counter()
        drafts = drafter.propose(views)
        self.counters.proposed(name, time.perf_counter() - start)
        for call, view, draft in zip(calls, views, drafts, strict=True):
            call.draft = draft.cut(view.max_draft)

    def draft_of(self, id: str) -> Draft:
        call = self._calls.get(id)
        return call.draft if call else Draft()

    def end(self, id: str) -> None:
        """The engine has dropped the request: it is done, or it was aborted, or never ran."""
        call = self._calls.pop(id, None)
        if call is None or not (drafter := self._drafter(call)):
            return
        if call.complete:
            drafter.finish(call.request)
        else:
            drafter.abort(call.request)
        if call.metadata.end_session and call.metadata.session:
            self.close(call.metadata.session)

    def close(self, session: SessionKey) -> None:
        for drafter in self.drafters.values():
            drafter.close(session)
