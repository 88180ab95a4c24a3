"""A drafter's drafts at every position of every call, found once and replayed many times: rules
that only cut drafts, or choose between them, are compared in a fraction of the time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlite.drafters.base import Drafter
from dlite.types import Draft, Evidence, Request, SessionKey, SourceClass, Verdict, View
from eval.rendering import Call
from eval.replay import make_request


@dataclass(slots=True)
class CallRecord:
    """Of the draft behind output token i: its length, how many of its tokens are right, and the
    length of the match that it is from."""

    lengths: array[int] = field(default_factory=lambda: array("b"))
    accepted: array[int] = field(default_factory=lambda: array("b"))
    matches: array[int] = field(default_factory=lambda: array("i"))


def record(
    sessions: Sequence[Sequence[Call]],
    drafter: Drafter,
    *,
    end_id: int,
    max_draft: int,
    on_tokens: Callable[[int], object] | None = None,
) -> dict[str, CallRecord]:
    """By call id. Every position is visited: `drafter` must not learn from verdicts."""
    records = {}
    for calls in sessions:
        for call in calls:
            request = make_request(call, tenant="record", end_id=end_id)
            records[call.id] = _record(call, request, drafter, max_draft)
            if on_tokens:
                on_tokens(len(call.output) - 1)
        drafter.close(SessionKey("record", calls[0].session))
    return records


def _record(call: Call, request: Request, drafter: Drafter, max_draft: int) -> CallRecord:
    from eval.profile import agreement

    drafter.start(request)
    found, tokens = CallRecord(), [*request.prompt, call.output[0]]
    for place, token in enumerate(call.output[1:], start=1):
        (draft,) = drafter.propose([View(request, tokens, max_draft)])
        found.lengths.append(len(draft.tokens))
        found.accepted.append(agreement(draft.tokens, call.output[place : place + max_draft]))
        found.matches.append(draft.evidence.match_length if draft.evidence else 0)
        tokens.append(token)
        drafter.observe(request, Draft(), Verdict(0, token))
    drafter.finish(request)
    return found


class RecordedDrafter:
    """`outputs` are the calls' by id; a draft's evidence holds its match's length alone."""

    name = "recorded"
    tap_ids: tuple[int, ...] = ()

    def __init__(
        self, records: Mapping[str, CallRecord], outputs: Mapping[str, Sequence[int]]
    ) -> None:
        self.records, self.outputs = records, outputs

    def start(self, request: Request) -> None:
        pass

    def propose(self, views: list[View]) -> list[Draft]:
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        call_id = view.request.id.partition(" ")[2]
        found, done = self.records[call_id], len(view.tokens) - len(view.request.prompt)
        if done - 1 >= len(found.lengths):
            return Draft()
        length, right = found.lengths[done - 1], found.accepted[done - 1]
        output = self.outputs[call_id]
        tokens = list(output[done : done + right])
        if length > right:
            after = output[done + right] if done + right < len(output) else 0
            tokens += [after + 1] * (length - right)
        evidence = Evidence(SourceClass.PROMPT, found.matches[done - 1], 1, 1)
        return Draft(tokens[: view.max_draft], source=self.name, evidence=evidence)

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass

    def abort(self, request: Request) -> None:
        pass

    def close(self, session: SessionKey) -> None:
        pass
