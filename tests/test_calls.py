"""The requests of an engine as drafters see them, with an engine played by the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlite.drafters.ngram import NgramDrafter
from dlite.metadata import Metadata
from dlite.types import AgentContext, Draft, Request, SessionKey, Verdict, View
from dlite.vllm_plugin.calls import Call, Calls, Step
from dlite.vllm_plugin.counters import Counters


class Fixed:
    """Drafts the same tokens always, and writes down what it is told."""

    name = "fixed"

    def __init__(self, tokens: list[int], tap_ids: tuple[int, ...] = ()) -> None:
        self.tokens, self.tap_ids = tokens, tap_ids
        self.told: list[Any] = []
        self.views: list[View] = []

    def start(self, request: Request) -> None:
        self.told.append(("start", request.id))

    def propose(self, views: list[View]) -> list[Draft]:
        self.views += views
        return [Draft(list(self.tokens), source="fixed") for _ in views]

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.told.append(("observe", request.id, draft.tokens, verdict.num_accepted))

    def finish(self, request: Request) -> None:
        self.told.append(("finish", request.id))

    def abort(self, request: Request) -> None:
        self.told.append(("abort", request.id))

    def close(self, session: SessionKey) -> None:
        self.told.append(("close", session))


def call(id: str = "r", max_new: int = 8, **metadata: Any) -> Call:
    request = Request(id, [1, 2, 3], max_new, frozenset({99}), agent=AgentContext(agent_id="coder"))
    return Call(request, Metadata(**metadata), lambda output: 50 in output, max_length=100)


def tokens(drafts: list[Draft]) -> list[list[int]]:
    return [draft.tokens for draft in drafts]


def test_a_round_is_judged_with_the_draft_that_was_verified() -> None:
    drafter = Fixed([4, 5, 6])
    calls = Calls({"fixed": drafter}, num_draft=7)
    calls.start(call())
    assert tokens(calls.step([Step("r", [4], 0)])) == [[4, 5, 6]]
    calls.step([Step("r", [4, 5, 9], 3)])
    calls.step([Step("r", [7], 2)])  # the engine had room for two of three
    observed = [told[2:] for told in drafter.told if told[0] == "observe"]
    assert observed == [([4, 5, 6], 2), ([4, 5], 0)]
    assert list(drafter.views[-1].tokens) == [1, 2, 3, 4, 4, 5, 9, 7]


def test_the_first_token_is_no_round_and_a_prompts_part_asks_for_nothing() -> None:
    drafter = Fixed([4])
    calls = Calls({"fixed": drafter}, num_draft=7)
    calls.start(call())
    assert tokens(calls.step([Step("r", [], 0)])) == [[]]
    calls.step([Step("r", [5], 0)])
    assert drafter.told == [("start", "r")]


def test_a_preempted_requests_draft_is_forgotten() -> None:
    """Its rows come again, without the draft: that one was never verified."""
    drafter = Fixed([4, 5])
    calls = Calls({"fixed": drafter}, num_draft=7)
    calls.start(call())
    calls.step([Step("r", [4], 0)])
    calls.start(call())  # resumed
    assert tokens(calls.step([Step("r", [], 0)])) == [[]]
    calls.step([Step("r", [8], 0)])
    assert drafter.told == [("start", "r"), ("observe", "r", [], 0)]
    assert list(drafter.views[-1].tokens) == [1, 2, 3, 4, 8]


def test_drafts_leave_room_for_the_targets_own_token() -> None:
    drafter = Fixed([4] * 7)
    calls = Calls({"fixed": drafter}, num_draft=5)
    calls.start(call("few", max_new=4))
    calls.start(call("one", max_new=2))
    lengths = [len(d) for d in tokens(calls.step([Step("few", [7], 0), Step("one", [7], 0)]))]
    assert lengths == [2, 0]


@pytest.mark.parametrize(
    ("sampled", "end"),
    [([4, 99, 7], "finish"), ([4] * 9, "finish"), ([50], "finish"), ([4], "abort")],
)
def test_an_end_is_told_from_an_abort(sampled: list[int], end: str) -> None:
    """By stop token, length, stop string; the engine says the same of all four."""
    drafter = Fixed([])
    calls = Calls({"fixed": drafter}, num_draft=7)
    calls.start(call())
    calls.step([Step("r", sampled, 0)])
    calls.end("r")
    calls.end("r")
    calls.end("never started")
    assert drafter.told == [("start", "r"), (end, "r")]


def test_tokens_behind_a_stop_are_not_sealed() -> None:
    one = call()
    calls = Calls({"ngram": NgramDrafter()}, num_draft=7)
    calls.start(one)
    calls.step([Step("r", [4, 99, 7], 0)])
    assert one.tokens == [1, 2, 3, 4, 99]


def test_a_session_ends_with_the_call_that_says_so() -> None:
    drafter, other = Fixed([]), Fixed([])
    calls = Calls({"fixed": drafter, "other": other}, num_draft=7)
    key = SessionKey("t", "s")
    calls.start(call(session=key, end_session=True))
    calls.end("r")
    assert drafter.told[-1] == other.told[-1] == ("close", key)


def test_requests_choose_their_drafter_and_the_first_is_the_default() -> None:
    calls = Calls({"a": Fixed([1]), "b": Fixed([2])}, num_draft=7)
    for name in ("a", "b", "none", ""):
        calls.start(call(name or "default", drafter=name))
    steps = [Step(id, [9], 0) for id in ("a", "b", "none", "default")]
    assert tokens(calls.step(steps)) == [[1], [2], [], [1]]


def test_each_drafter_gets_the_layers_that_it_asked_for() -> None:
    first, second = Fixed([1], (0, 5)), Fixed([2], (3,))
    calls = Calls({"first": first, "second": second}, num_draft=7)
    assert calls.tap_ids == (0, 3, 5)
    calls.start(call("a", drafter="first"))
    calls.start(call("b", drafter="second"))
    calls.start(call("c", drafter="none"))
    steps = [Step(id, [9], 0) for id in "abc"]
    assert [calls.wants_taps(step) for step in steps] == [True, True, False]
    assert not calls.wants_taps(Step("a", [], 0))
    taps = {id: torch.tensor([[0.0], [3.0], [5.0]]) for id in "ab"}
    calls.step(steps, taps)
    assert first.views[0].taps_LD is not None and first.views[0].taps_LD.flatten().tolist() == [
        0,
        5,
    ]
    assert second.views[0].taps_LD is not None and second.views[0].taps_LD.tolist() == [[3]]


def test_counters_see_what_was_verified_by_role_and_source() -> None:
    rows = []

    class Seen(Counters):
        def judged(self, role: str, draft: Draft, num_accepted: int) -> None:
            rows.append((role, draft.source, len(draft.tokens), num_accepted))

    calls = Calls({"fixed": Fixed([4, 5])}, 7, Seen())
    calls.start(call())
    calls.step([Step("r", [4], 0)])
    calls.step([Step("r", [4, 9], 2)])
    assert rows == [("coder", "fixed", 2, 1)]
