"""How a request ends: stop tokens, limits, refusals; and what is streamed until then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import save_tiny_llama
from oracle import OracleDrafter, TruthDrafter, requests

from dlite.decode import decode
from dlite.drafters.ngram import NgramDrafter
from dlite.target import TargetModel
from dlite.types import Draft, Request, Verdict, View


def test_tokens_are_streamed_as_they_are_committed(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    streamed: dict[str, list[int]] = {}

    def on_tokens(request: Request, tokens: list[int]) -> None:
        streamed.setdefault(request.id, []).extend(tokens)

    decode(tiny_target, requests(), OracleDrafter(answers), batch_size=3, on_tokens=on_tokens)
    assert streamed == answers


def test_a_stop_token_inside_an_accepted_draft_ends_the_request_there(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    (request,) = [r for r in requests() if r.id == "r1"]
    stop_at = 11
    assert answers["r1"].index(answers["r1"][stop_at]) == stop_at
    request.stop_ids = frozenset({511, answers["r1"][stop_at]})
    (done,) = decode(tiny_target, [request], TruthDrafter(answers)).completions
    assert done.tokens == answers["r1"][: stop_at + 1]
    assert done.finish_reason == "stop"
    assert [r.emitted for r in done.rounds] == [8, 3]
    assert [r.cut for r in done.rounds] == [False, True]
    assert done.rounds[-1].accepted == 3


def test_each_id_of_an_eos_list_ends_a_request(
    tmp_path: Path, answers: dict[str, list[int]]
) -> None:
    first, second = answers["r0"][4], answers["r1"][6]
    target = TargetModel.load(str(save_tiny_llama(tmp_path, eos_token_id=[first, second])))
    for name, end in (("r0", 5), ("r1", 7)):
        (request,) = [r for r in requests() if r.id == name]
        (done,) = decode(target, [request], None).completions
        assert done.tokens == answers[name][:end]
        assert done.finish_reason == "stop"


def test_the_length_limit_is_met_exactly_and_drafts_never_pass_it(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    drafter = TruthDrafter(answers)
    result = decode(tiny_target, requests(), drafter, num_draft=7)
    for done in result.completions:
        assert len(done.tokens) == done.request.max_new_tokens
        assert done.finish_reason == "length"
    for view in drafter.seen:
        left = view.request.max_new_tokens - (len(view.tokens) - len(view.request.prompt))
        assert view.max_draft == min(7, left - 1)


def test_a_draft_longer_than_asked_for_is_cut(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    class Eager(OracleDrafter):
        def propose(self, views: list[View]) -> list[Draft]:
            return [Draft([5] * 20, torch.full((20, 512), 1 / 512)) for _ in views]

        def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
            assert len(draft.tokens) <= 3
            assert draft.probs_KV is not None
            assert len(draft.probs_KV) == len(draft.tokens)

    result = decode(tiny_target, requests(), Eager(answers), num_draft=3, batch_size=3)
    assert [done.tokens for done in result.completions] == list(answers.values())


def test_a_request_may_fill_the_targets_longest_sequence(tiny_target: TargetModel) -> None:
    prompt = [(5 * j) % 300 + 3 for j in range(500)]
    full = Request("full", prompt, 12)
    (done,) = decode(tiny_target, [full], NgramDrafter()).completions
    assert len(done.tokens) == 12
    with pytest.raises(ValueError, match=r"'full'.* of 513 tokens exceeds the 512 .* shorten"):
        decode(tiny_target, [Request("full", prompt, 13)], None)


@pytest.mark.parametrize(("prompt", "limit"), [([], 5), ([3], 0)])
def test_an_empty_request_is_refused_by_its_id(
    tiny_target: TargetModel, prompt: list[int], limit: int
) -> None:
    with pytest.raises(ValueError, match=r"request 'odd' has .* at least 1"):
        decode(tiny_target, [Request("odd", prompt, limit)], None)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("num_draft", -1)])
def test_a_count_that_can_do_nothing_is_refused(
    tiny_target: TargetModel, name: str, value: int
) -> None:
    """Catches a loop that waits for room for ever."""
    with pytest.raises(ValueError, match=f"{name} is {value}; give"):
        decode(tiny_target, requests(), None, **{name: value})  # pyright: ignore
