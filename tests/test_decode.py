"""The decoding loop: any drafter, any batch, the target's own tokens."""

from __future__ import annotations

import pytest
import torch
from oracle import OracleDrafter, requests

from dlite.decode import DecodeResult, decode, top2_margins
from dlite.drafters.ngram import NgramDrafter
from dlite.target import TargetModel
from dlite.types import Request, Sampling, tokens_per_step


def outputs(result: DecodeResult) -> list[list[int]]:
    return [completion.tokens for completion in result.completions]


def test_plain_decoding_is_the_argmax_of_whole_forwards(
    tiny_target: TargetModel, plain_result: DecodeResult
) -> None:
    for done in plain_result.completions:
        ids = list(done.request.prompt)
        for token in done.tokens:
            with torch.no_grad():
                logits_V = tiny_target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert token == int(logits_V.argmax())
            ids.append(token)
        assert len(done.rounds) == len(done.tokens) - 1


@pytest.mark.parametrize("batch_size", [2, 3, 64])
def test_a_batch_decodes_as_one_by_one(
    tiny_target: TargetModel, plain_result: DecodeResult, batch_size: int
) -> None:
    result = decode(tiny_target, requests(), None, batch_size=batch_size)
    assert outputs(result) == outputs(plain_result)
    assert [done.request.id for done in result.completions] == [r.id for r in requests()]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("num_draft", [1, 7])
def test_ragged_acceptance_changes_no_token(
    tiny_target: TargetModel, answers: dict[str, list[int]], batch_size: int, num_draft: int
) -> None:
    """Catches rows that advance by another row's count and caches that keep rejected tokens."""
    drafter = OracleDrafter(answers)
    result = decode(tiny_target, requests(), drafter, num_draft=num_draft, batch_size=batch_size)
    for done in result.completions:
        assert done.tokens == answers[done.request.id]
        assert [r.accepted for r in done.rounds] == drafter.right[done.request.id]
        assert 1 + sum(r.emitted for r in done.rounds) == len(done.tokens)
        assert [r.cut for r in done.rounds] == [False] * (len(done.rounds) - 1) + [True][
            : len(done.rounds)
        ]
        assert all(r.emitted == r.accepted + 1 and r.drafted <= num_draft for r in done.rounds)
    assert tokens_per_step(r for done in result.completions for r in done.rounds) > 1


def test_a_view_holds_the_taps_at_the_position_before_the_anchor(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    """Catches taps of the anchor's row, of a rejected row, or of another request."""
    layer_ids = (3, 0, 2)
    drafter = OracleDrafter(answers, layer_ids)
    decode(tiny_target, requests(), drafter, batch_size=3)
    captured = tiny_target.capture([list(view.tokens) for view in drafter.seen], layer_ids)
    for view, taps_SLD in zip(drafter.seen, captured, strict=True):
        assert view.taps_LD is not None
        torch.testing.assert_close(view.taps_LD, taps_SLD[-2], atol=1e-4, rtol=1e-4)


def test_a_drafter_sees_each_call_start_once_and_finish_once(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    drafter = OracleDrafter(answers)
    decode(tiny_target, requests(), drafter, batch_size=3)
    for request in requests():
        calls = [call for call, name in drafter.log if name == request.id]
        num_rounds = calls.count("propose")
        assert calls == ["start", *["propose", "observe"] * num_rounds, "finish"]
    assert ("propose", "r2") not in drafter.log  # its one token is the prefill's


def test_an_interrupt_aborts_every_running_call(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    def interrupt(request: Request, tokens: list[int]) -> None:
        if request.id == "r4":
            raise KeyboardInterrupt

    drafter = OracleDrafter(answers)
    with pytest.raises(KeyboardInterrupt):
        decode(tiny_target, requests(), drafter, batch_size=3, on_tokens=interrupt)
    started = [name for call, name in drafter.log if call == "start"]
    ended = [name for call, name in drafter.log if call in ("finish", "abort")]
    assert ("abort", "r4") in drafter.log
    assert sorted(started) == sorted(ended)


def test_sampled_rows_do_not_depend_on_their_neighbours(tiny_target: TargetModel) -> None:
    """Catches randomness that requests share, and greedy rows judged as sampled ones."""
    mixed = [
        Request(r.id, r.prompt, r.max_new_tokens, sampling=sampling)
        for r, sampling in zip(
            requests(),
            [Sampling(), *(Sampling(1.0, 20, 0.95, seed=i) for i in range(6))],
            strict=True,
        )
    ]
    apart = decode(tiny_target, mixed, NgramDrafter(), batch_size=1)
    assert outputs(decode(tiny_target, mixed, NgramDrafter(), batch_size=4)) == outputs(apart)
    reseeded = [Request(r.id, r.prompt, 20, sampling=Sampling(1.0, seed=9)) for r in mixed]
    assert outputs(decode(tiny_target, reseeded, None)) != outputs(apart)


def test_unseeded_sampling_differs_between_calls(tiny_target: TargetModel) -> None:
    request = Request("r", [5, 6, 7], 20, sampling=Sampling(1.0))
    first, second = (outputs(decode(tiny_target, [request], None)) for _ in range(2))
    assert first != second


def test_times_add_up(tiny_target: TargetModel, answers: dict[str, list[int]]) -> None:
    result = decode(tiny_target, requests(), OracleDrafter(answers))
    times = result.times
    assert min(times.draft_seconds, times.verify_seconds, times.other_seconds) > 0
    parts = times.draft_seconds + times.verify_seconds + times.other_seconds
    assert parts == pytest.approx(times.total_seconds)
    assert all(0 < done.prefill_seconds < times.other_seconds for done in result.completions)


def test_margins_are_those_of_the_teacher_forced_logits(
    tiny_target: TargetModel, plain_result: DecodeResult
) -> None:
    done = plain_result.completions[1]
    ids = [*done.request.prompt, *done.tokens]
    with torch.no_grad():
        logits_SV = tiny_target.model(torch.tensor([ids]), use_cache=False).logits[0]
    margins = top2_margins(tiny_target, done.request.prompt, done.tokens)
    assert len(margins) == len(done.tokens)
    for i, margin in enumerate(margins):
        row_V = logits_SV[len(done.request.prompt) - 1 + i]
        others_V = row_V.clone()
        others_V[done.tokens[i]] = -torch.inf
        assert margin == pytest.approx(float(row_V.max() - others_V.max()), abs=1e-3)


def test_no_requests_is_no_work(tiny_target: TargetModel) -> None:
    assert decode(tiny_target, [], None).completions == []


def test_ngram_drafts_leave_real_greedy_text_unchanged(smollm2: TargetModel) -> None:
    questions = [
        "What is the capital of France?",
        "Write a Python function that reverses a list.",
        "Repeat this exactly: the cat sat on the mat, the cat sat on the mat, the cat sat.",
        "Count from one to ten in words.",
    ]
    real = [
        Request(str(i), smollm2.render([{"role": "user", "content": question}]), 40)
        for i, question in enumerate(questions)
    ]
    wanted = decode(smollm2, real, None, batch_size=4)
    found = decode(smollm2, real, NgramDrafter(), batch_size=2)
    assert outputs(found) == outputs(wanted)
    assert tokens_per_step(r for done in found.completions for r in done.rounds) > 1.05
