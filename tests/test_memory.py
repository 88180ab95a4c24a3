"""The memory behind the retrieval drafters: what is indexed, once, and what is forgotten."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions
from dlite.drafters.copying import CopyDrafter, CopyOptions
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.types import AgentContext, Draft, OpenedFile, Request, SessionKey, Verdict, View

KEY = SessionKey("tenant", "session")


def encode(text: str) -> list[int]:
    return list(text.encode())


def request(name: str, prompt: str | list[int], key: SessionKey | None = KEY, **agent: Any):
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    return Request(name, ids, 64, session=key, agent=AgentContext(**agent))


def words(rng: random.Random, size: int) -> list[int]:
    """Text that repeats itself: runs copied from what came before, and new tokens."""
    text = [rng.randrange(9) for _ in range(8)]
    while len(text) < size:
        start, run = rng.randrange(len(text)), rng.randrange(1, 12)
        text += [*text[start : start + run], rng.randrange(9)]
    return text[:size]


def replay(drafters: list[Any], calls: list[tuple[Request, list[int]]], max_draft: int = 16):
    """Each drafter's drafts over the calls, the true tokens committed as far as they agree."""
    for one, output in calls:
        for drafter in drafters:
            drafter.start(one)
        done = 1
        while done < len(output):
            tokens = one.prompt + output[:done]
            drafts = [drafter.propose([View(one, tokens, max_draft)])[0] for drafter in drafters]
            yield drafts
            accepted = 0
            for token in drafts[0].tokens:
                if done + accepted >= len(output) or token != output[done + accepted]:
                    break
                accepted += 1
            for drafter, draft in zip(drafters, drafts, strict=True):
                drafter.observe(one, draft, Verdict(min(accepted, len(draft.tokens)), 0))
            done += accepted + 1
        for drafter in drafters:
            # The last tokens are committed after the last round.
            drafter.propose([View(one, one.prompt + output, max_draft)])
            drafter.finish(one)


def agspec(**options: Any) -> AgSpecDrafter:
    chosen = AgSpecOptions(**options)
    return AgSpecDrafter(Memory(chosen, encode=encode), chosen)


def sam(rule: str) -> CopyDrafter:
    options = CopyOptions(live_rule=rule)
    return CopyDrafter("sam", Memory(options), options)


def single_scope(rng: random.Random, num_calls: int) -> list[tuple[Request, list[int]]]:
    """One agent whose prompt is always its last one, its answer and a tool's output."""
    calls, prompt = [], words(rng, 40)
    for number in range(num_calls):
        text = words(rng, 60)
        output, tool = text[:30], text[20:50]
        calls.append((request(f"c{number}", list(prompt)), output))
        prompt = prompt + output + tool
    return calls


@pytest.mark.parametrize("rule", ["recent", "vote", "first"])
def test_a_session_of_one_agent_drafts_what_its_call_alone_would(rule: str) -> None:
    """Text indexed twice, or a seam in the stream, would change matches, counts or places."""
    rng = random.Random(0)
    rounds = 0
    for _ in range(10):
        session = agspec(live_rule=rule, online=False)
        call = sam(rule)
        for ours, theirs in replay([session, call], single_scope(rng, 6)):
            assert ours.tokens == theirs.tokens
            rounds += bool(ours.tokens)
    assert rounds > 300


def test_only_what_is_new_of_a_prompt_is_indexed() -> None:
    memory = Memory()
    rng = random.Random(1)
    for one, output in single_scope(rng, 8):
        memory.start(one)
        memory.candidates(View(one, one.prompt + output, 8))
        memory.finish(one)
        assert memory.num_tokens == len(one.prompt) + len(output)


def test_calls_of_one_session_see_each_other_while_they_run() -> None:
    memory = Memory()
    first, second = request("a", "the quick brown fox"), request("b", "a lazy dog: the qu")
    memory.start(first)
    memory.start(second)
    (draft,) = memory.candidates(View(second, second.prompt, 8))
    assert bytes(draft.tokens) == b"ick brow"
    memory.candidates(View(first, first.prompt + encode(" jumps over"), 8))
    drafts = memory.candidates(View(second, second.prompt + encode("ick brown fox jum"), 8))
    assert [bytes(d.tokens) for d in drafts] == [b"ps over"]
    for one in (first, second):
        memory.finish(one)


def test_what_an_aborted_call_generated_is_not_drafted() -> None:
    memory = Memory()
    broken = request("a", "read: abc")
    memory.start(broken)
    memory.candidates(View(broken, broken.prompt + encode("SECRET plan"), 8))
    memory.abort(broken)
    later = request("b", "read: abc and SECR")
    memory.start(later)
    assert memory.candidates(View(later, later.prompt, 8)) == []
    known = memory.candidates(View(later, later.prompt + encode(" read: a"), 8))
    assert [bytes(d.tokens[:2]) for d in known] == [b"bc"]


def test_a_file_is_drafted_in_the_form_in_which_it_is_written() -> None:
    memory = Memory(MemoryOptions(forms=["full", "json", "denumber"]), encode=encode)
    text = '     7\tdef f():\n     8\t    return "x"\n'
    one = request("a", "start", files=(OpenedFile("f.py", text),))
    memory.start(one)
    plain = memory.candidates(View(one, one.prompt + encode("def f():\n"), 20))
    assert [(d.source, bytes(d.tokens)) for d in plain] == [
        ("workspace:full", b'    return "x"\n'),
    ]
    (quoted,) = memory.candidates(View(one, one.prompt + encode("def f():\n zz f():\\n"), 20))
    assert (quoted.source, bytes(quoted.tokens)) == ("workspace:json", b'    return \\"x\\"\\n')


def test_a_form_that_never_pays_is_no_longer_searched() -> None:
    memory = Memory(MemoryOptions(forms=["plus"]), encode=encode)
    one = request("a", "start", files=(OpenedFile("f.py", "alpha beta"),))
    memory.start(one)
    view = View(one, one.prompt + encode("+al"), 16)
    (draft,) = memory.candidates(view)
    assert draft.source == "workspace:plus"
    for _ in range(70):
        memory.observe(one, Draft(draft.tokens, source=draft.source), Verdict(0, 1))
    assert memory.candidates(view) == []
