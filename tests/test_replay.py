"""Replay by teacher forcing: what is accepted, what counts, and what a drafter gets to see."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from oracle import OracleDrafter

from dlite.costs import CostTable
from dlite.drafters.base import Drafter
from dlite.drafters.registry import build
from dlite.types import Draft, Request, SessionKey, View, tokens_per_step
from eval import metrics
from eval import replay as replaying
from eval.lookup import PromptLookup
from eval.partner import RATES, SimulatedDrafter
from eval.profile import agreement
from eval.rendering import Call
from eval.replay import Replay, step_cost
from eval.tally import ci95, grouped, merge, tally, total

END = 511
COST = CostTable.roofline(8, per_token=0.01)


def make_sessions(num_sessions: int = 5) -> list[list[Call]]:
    """Random sessions of one to four calls whose prompts go on from one another."""
    draw = random.Random(7)
    sessions = []
    for number in range(num_sessions):
        calls, prompt = [], [draw.randrange(9) for _ in range(12)]
        for turn in range(1, draw.randint(2, 5)):
            output = [draw.randrange(9) for _ in range(draw.randint(0, 40))] + [END]
            name = f"s{number}"
            calls.append(
                Call(
                    f"{name}#{turn}",
                    name,
                    name,
                    "g",
                    "a",
                    "main",
                    turn,
                    False,
                    (),
                    [prompt],
                    output,
                )
            )
            prompt = [*prompt, *output, *(draw.randrange(9) for _ in range(6))]
        sessions.append(calls)
    return sessions


def replay(sessions: list[list[Call]], drafter: Any, **options: Any) -> Replay:
    return replaying.replay(sessions, drafter, **{"end_id": END, "costs": COST, **options})


SESSIONS = make_sessions()
CALLS = {call.id: call for session in SESSIONS for call in session}


class Oracle(OracleDrafter):
    """Knows every call's output in every slot; checks that what it sees is the record."""

    def __init__(self) -> None:
        super().__init__({})
        self.closed: list[SessionKey] = []

    def start(self, request: Request) -> None:
        self.log.append(("start", request.id))
        self.right.setdefault(request.id, [])
        call = CALLS[request.id.partition(" ")[2]]
        assert request.prompt == call.prompt()
        self.answers[request.id] = call.output

    def propose(self, views: list[View]) -> list[Draft]:
        for view in views:
            output = view.tokens[len(view.request.prompt) :]
            assert output and output == self.answers[view.request.id][: len(output)]
        return super().propose(views)

    def observe(self, request: Request, draft: Draft, verdict: object) -> None:
        self.log.append(("observe", request.id))

    def abort(self, request: Request) -> None:
        self.log.append(("abort", request.id))

    def close(self, session: SessionKey) -> None:
        self.closed.append(session)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_token_counts_twice_or_never(batch: int) -> None:
    done = replay(SESSIONS, Oracle(), batch=batch, seed=1, max_draft=6)
    emitted = Counter[str]()
    for step in done.steps:
        emitted[step.call.id] += step.round.emitted
    assert emitted == {c.id: len(c.output) - 1 for c in CALLS.values() if len(c.output) > 1}


def test_a_draft_is_accepted_up_to_another_place_than_its_first_wrong_token() -> None:
    drafter = Oracle()
    done = replay(SESSIONS, drafter, max_draft=6)
    right = {name.partition(" ")[2]: iter(found) for name, found in drafter.right.items()}
    for step in done.steps:
        assert step.round.accepted == next(right[step.call.id])
        assert step.round.emitted == step.round.accepted + (not step.round.cut) or step.round.cut


def test_a_later_call_runs_before_the_drafter_saw_the_earlier_ones() -> None:
    drafter = Oracle()
    replay(SESSIONS, drafter, batch=8, max_draft=6)
    started = [name for kind, name in drafter.log if kind == "start"]
    for place, name in enumerate(started):
        slot, _, call_id = name.partition(" ")
        session, turn = call_id.split("#")
        if turn != "1":
            before = [other for other in started[:place] if other.startswith(f"{slot} {session}#")]
            assert before[-1].endswith(f"#{int(turn) - 1}")
    ended = Counter(name for kind, name in drafter.log if kind in ("finish", "abort"))
    assert ended == Counter(started)


def test_sessions_stay_open_behind_their_last_call() -> None:
    drafter = Oracle()
    replay(SESSIONS, drafter, seed=2)
    assert sorted(key.session for key in drafter.closed) == sorted(s[0].session for s in SESSIONS)


def test_goodput_is_not_tokens_over_the_cost_of_full_batches() -> None:
    done = replay(SESSIONS, Oracle(), costs=COST, max_draft=6)
    seconds = [step_cost(COST, 1, 1 + step.round.drafted) for step in done.steps]
    assert [step.cost for step in done.steps] == seconds
    counts = total(tally(done).values())
    expected = sum(s.round.emitted for s in done.steps) / sum(seconds) * step_cost(COST, 1, 1)
    assert counts.goodput_vs_plain(1, COST) == pytest.approx(expected)


def test_plain_decoding_is_not_worth_one() -> None:
    class Plain(Oracle):
        def propose(self, views: list[View]) -> list[Draft]:
            return [Draft() for _ in views]

    for batch in (1, 4):
        done = replay(SESSIONS, Plain(), batch=batch, costs=COST)
        counts = total(tally(done).values())
        assert counts.goodput_vs_plain(batch, COST) == pytest.approx(1)
        assert (counts.tokens_per_step, counts.accept_length, counts.rejection_rate) == (
            1,
            None,
            None,
        )


def test_the_cost_of_drafting_is_left_out() -> None:
    kwargs = {"end_id": END, "batch": 2, "max_draft": 3, "costs": COST}
    free = replay(SESSIONS, Oracle(), **kwargs)
    dear = replay(SESSIONS, Oracle(), drafting_cost=lambda: 0.5, **kwargs)
    assert [s.cost + 0.25 for s in free.steps] == pytest.approx([s.cost for s in dear.steps])


def test_sums_differ_from_the_metrics_of_the_rounds() -> None:
    done = replay(SESSIONS, Oracle(), batch=2, max_draft=6)
    rounds, cells = [step.round for step in done.steps], tally(done)
    counts = total(cells.values())
    assert counts.tokens_per_step == tokens_per_step(rounds)
    assert counts.accept_length == metrics.accept_length(rounds)
    assert counts.rejection_rate == metrics.rejection_rate(rounds)
    by_session = [
        Replay(1, [s for s in done.steps if s.call.session == f"s{i}"])
        for i in range(len(SESSIONS))
    ]
    merged = total(merge(map(tally, by_session)).values())
    assert merged.cost == pytest.approx(counts.cost)
    assert (merged.rounds, merged.drafted, merged.accepted) == (
        counts.rounds,
        counts.drafted,
        counts.accepted,
    )
    assert grouped(cells, lambda cell: cell.session).keys() == {f"s{i}" for i in range(5)}
    low, high = ci95(cells)
    assert low < counts.tokens_per_step < high


def test_calls_of_one_token_are_stepped_over_forever() -> None:
    call = Call("s#1", "s", "s", "g", "a", "main", 1, False, (), [[1, 2]], [END])
    longer = Call("s#2", "s", "s", "g", "a", "main", 2, False, (), [[1, 2, END]], [3, END])
    done = replay([[call, longer]], build("sam"))
    assert [step.round.emitted for step in done.steps] == [1]


# ---- drafters under replay ---------------------------------------------------------------------


def first_occurrence(tokens: list[int], sizes: range, num_draft: int) -> list[int]:
    for n in sizes:
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[-n:] and n <= len(tokens):
                return tokens[end : end + num_draft]
    return []


def longest_recent(tokens: list[int]) -> list[int]:
    """What followed the newest earlier occurrence of the longest suffix that has one."""
    for n in range(len(tokens) - 1, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + n]
    return []


def compared(drafter: Drafter, slow: Callable[[list[int]], list[int]], batch: int) -> int:
    """Replays, comparing each draft with a search over the whole text; how many there were."""
    propose, count = drafter.propose, 0

    def checked(views: list[View]) -> list[Draft]:
        nonlocal count
        drafts = propose(views)
        for view, draft in zip(views, drafts, strict=True):
            if view.max_draft > 1:
                assert draft.tokens == slow(list(view.tokens))[: view.max_draft]
                count += 1
        return drafts

    drafter.propose = checked
    replay(SESSIONS, drafter, batch=batch)
    return count


@pytest.mark.parametrize("batch", [1, 4])
def test_prompt_lookup_copies_another_place_than_the_first(batch: int) -> None:
    drafter = PromptLookup(7, min_n=1, max_n=3)
    num_drafts = compared(
        drafter, lambda tokens: first_occurrence(tokens, range(3, 0, -1), 7), batch
    )
    assert num_drafts > 100


@pytest.mark.parametrize("history", ["call", "session"])
def test_sessions_of_one_scope_draft_otherwise_than_a_search_over_the_call(history: str) -> None:
    assert compared(build("sam", {"history": history}), longest_recent, 2) > 100


# ---- the simulated partner ---------------------------------------------------------------------


def test_the_simulated_draft_model_is_accepted_at_other_rates() -> None:
    draw = random.Random(3)
    output = [draw.randrange(500) for _ in range(20_000)]
    call = Call("s#1", "s", "s", "g", "a", "main", 1, False, (), [[1]], output)
    partner = SimulatedDrafter({"s#1": output}, cost=lambda batch: 0.1 + 0.01 * batch)
    done = replay([[call]], partner, drafting_cost=partner.take_cost)
    rounds = [step.round for step in done.steps]
    found = [rate or 0.0 for rate in metrics.conditional_acceptance_by_position(rounds)]
    assert found == pytest.approx(RATES, abs=0.03)
    assert tokens_per_step(rounds) == pytest.approx(3.27, abs=0.05)
    assert done.steps[0].cost == pytest.approx(step_cost(COST, 1, 8) + 0.11)


def test_the_simulated_draft_model_draws_anew_for_another_drafter() -> None:
    def accepted(seed: int, max_draft: int) -> list[int]:
        outputs = {name: call.output for name, call in CALLS.items()}
        drafter = SimulatedDrafter(outputs, seed=seed)
        proposed: dict[tuple[str, int], int] = {}
        propose = drafter.propose

        def kept(views: list[View]) -> list[Draft]:
            drafts = propose(views)
            for view, draft in zip(views, drafts, strict=True):
                name = view.request.id.partition(" ")[2]
                done = len(view.tokens) - len(view.request.prompt)
                proposed[name, done] = agreement(draft.tokens, outputs[name][done:])
            return drafts

        drafter.propose = kept
        replay(SESSIONS, drafter, max_draft=max_draft)
        return [proposed.get((name, 1), -1) for name in CALLS]

    assert accepted(0, 7) == accepted(0, 9)
    assert accepted(0, 7) != accepted(1, 7)
