"""The nine promises of isolation (docs/retrieval.md), each held against an adversary."""

from __future__ import annotations

import ctypes
import logging
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_memory import KEY, encode, request, words

from dlite.drafters.agentspec import AgentSpecOptions
from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions
from dlite.drafters.lane import Lane
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.drafters.registry import build
from dlite.retrieval import NATIVE
from dlite.retrieval.corpus import Document, load
from dlite.retrieval.corpus import build as build_corpus
from dlite.types import AgentContext, Draft, OpenedFile, Request, SessionKey, Verdict, View

CANARY = [0x5EC2E7 + i * 7919 for i in range(40)]
OTHER = SessionKey("rival", "session")
DRAFTERS: dict[str, dict[str, Any]] = {
    "sam": {},
    "suffix": {},
    "agentspec": {"mode": "class"},
    "agspec": {},
}


def make(name: str, **options: Any) -> Any:
    if name == "suffix" or options.get("engine") == "arctic":
        pytest.importorskip("arctic_inference.suffix_decoding._C")
    return build(name, {**DRAFTERS[name], **options})


def workload(key: SessionKey, seed: int) -> Iterator[tuple[Request, list[int]]]:
    rng = random.Random(seed)
    prompt = words(rng, 50)
    for number in range(5):
        output = words(rng, 40)
        agent = AgentContext(f"agent{number % 2}", f"query{number % 3}")
        yield Request(f"{key.tenant}{number}", list(prompt), 64, session=key, agent=agent), output
        prompt = prompt + output


def rounds(drafter: Any, key: SessionKey, seed: int) -> Iterator[Draft]:
    """Every draft of a session, the next one when it is asked for."""
    for one, output in workload(key, seed):
        drafter.start(one)
        done = 1
        while done < len(output):
            (draft,) = drafter.propose([View(one, one.prompt + output[:done], 8)])
            yield draft
            truth = output[done : done + len(draft.tokens)]
            agree = [a == b for a, b in zip(draft.tokens, truth, strict=False)]
            accepted = agree.index(False) if False in agree else len(agree)
            drafter.observe(one, draft, Verdict(accepted, 0))
            done += accepted + 1
        drafter.finish(one)
    drafter.close(key)


@pytest.mark.parametrize("name", DRAFTERS)
def test_p1_another_session_changes_a_draft(name: str) -> None:
    """The rival reads and writes the same text, and text of its own, between any two rounds."""
    alone = list(rounds(make(name), KEY, seed=1))
    assert sum(bool(draft.tokens) for draft in alone) > 30
    for rival_seed in (1, 2, 3):
        drafter = make(name)
        rival = rounds(drafter, OTHER, rival_seed)
        beside = []
        for draft in rounds(drafter, KEY, seed=1):
            beside.append(draft)
            next(rival, None)
        assert beside == alone


@pytest.mark.parametrize("engine", ["automaton", "chain", "arctic"])
def test_p2_a_session_outlives_its_end(engine: str) -> None:
    drafter = make("agspec", engine=engine)
    one = request("a", [*words(random.Random(0), 90), *CANARY])
    drafter.start(one)
    drafter.propose([View(one, [*one.prompt, *CANARY[:20]], 8)])
    session = weakref.ref(drafter.memory.session(one))
    drafter.finish(one)
    drafter.close(KEY)
    assert session() is None
    rng = random.Random(5)
    again = request("b", [1, 2, 3])
    drafter.start(again)
    tokens = list(again.prompt)
    for _ in range(500):
        start = rng.randrange(len(CANARY) - 6)
        tokens += [*CANARY[start : start + 5], rng.choice(CANARY)]
        (draft,) = drafter.propose([View(again, tokens, 8)])
        written = {tuple(tokens[i : i + 8]) for i in range(len(tokens))}
        copied = tuple(draft.tokens)
        assert not copied or any(run[: len(copied)] == copied for run in written)


@pytest.mark.skipif(not NATIVE, reason="Python's numbers can't be overwritten")
def test_p3_a_secret_stays_in_the_memory_of_a_closed_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the indexes and the logs beside them held, looked at just before it is returned."""
    memory = Memory(MemoryOptions(forms=["full"]), encode=lambda text: CANARY)
    one = request("a", [*CANARY, 1, 2], files=(OpenedFile("x.py", "text"),))
    memory.start(one)
    memory.candidates(View(one, [*one.prompt, *CANARY[::-1]], 8))
    memory.finish(one)
    session = memory._sessions[KEY]
    (lane,) = session._lanes[None]._lanes
    (scope,) = session._lanes[None]._scopes
    assert session.workspace
    logs = [lane.log._data, scope._data, *(text.tokens for text in session.workspace._texts)]
    indexes: list[Any] = [lane.index, session.workspace.index]
    for log in logs:
        assert CANARY[3] in log
    wiped = []
    for index in indexes:
        assert any(ctypes.string_at(*held) for held in index.memory_ranges() if held[1])
        index.wipe()  # what close() does before it unmaps
        wiped += [ctypes.string_at(*held) for held in index.memory_ranges() if held[1]]
    assert not any(byte for part in wiped for byte in part)
    closed = []
    monkeypatch.setattr(Lane, "close", lambda self: closed.append(self.log.close()))
    memory.close(KEY)
    assert closed and not any(np.any(log) for log in logs)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_p3_sessions_leave_memory_behind() -> None:
    memory = Memory()

    def live(number: int) -> None:
        one = request(f"r{number}", [token * 31 % 997 for token in range(400)])
        memory.start(one)
        memory.candidates(View(one, [*one.prompt, 1, 2, 3], 8))
        memory.finish(one)
        memory.close(KEY)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for number in range(300):
        live(number)
    before = resident()
    for number in range(10_000):
        live(number)
    assert resident() <= before * 1.05


def test_p4_a_session_writes_into_the_static_corpus(tmp_path: Path) -> None:
    build_corpus(tmp_path, [Document("known.txt", encode("the public text"))], tokenizer="t")
    corpus = load(tmp_path, tokenizer="t")
    before = (tmp_path / "corpus.safetensors").read_bytes()
    options = AgSpecOptions(delta=0)
    drafter = AgSpecDrafter(Memory(options, corpus=corpus), options)
    one = request("a", "SECRET")
    drafter.start(one)
    (draft,) = drafter.propose([View(one, encode("SECRET the pub"), 8)])
    assert (draft.source, bytes(draft.tokens)) == ("global", b"lic tex")  # m = 7
    drafter.finish(one)
    drafter.close(KEY)
    cursor = corpus.cursor()
    cursor.extend(encode("SECR"))
    assert cursor.find(1, 8).tokens == []
    assert (tmp_path / "corpus.safetensors").read_bytes() == before
    assert not hasattr(corpus, "extend")


def test_p5_sessions_of_one_name_meet_across_tenants_or_without_one() -> None:
    memory = Memory()
    one = request("a", "the secret plan")
    memory.start(one)
    memory.finish(one)
    for number, key in enumerate([SessionKey("rival", KEY.session), None, None]):
        other = request(f"b{number}", "x the secr", key)
        memory.start(other)
        assert memory.candidates(View(other, other.prompt, 8)) == []
        memory.finish(other)
    named = [KEY, SessionKey("rival", KEY.session)]
    assert list(memory._sessions) == named  # a call without a session ends with itself


def test_p6_content_is_logged_or_shown(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    drafter = make("agspec")
    one = request("a", CANARY)
    drafter.start(one)
    (draft,) = drafter.propose([View(one, [*CANARY, *CANARY[:9]], 8)])
    assert draft.tokens
    call, session = drafter.memory._calls["a"], drafter.memory.session(one)
    assert session is not None
    shown = [
        repr(thing) for thing in (drafter, drafter.memory, call, session, call.lane, call.lanes)
    ]
    drafter.abort(one)
    drafter.close(KEY)
    out, err = capfd.readouterr()
    everything = "\n".join([caplog.text, out, err, *shown])
    assert not any(str(token) in everything for token in CANARY)


@pytest.mark.skipif(not NATIVE, reason="the Python twins are slower")
def test_p7_a_session_grows_without_limit_or_hostile_text_takes_time() -> None:
    memory = Memory(MemoryOptions(max_session_tokens=20_000))
    start = time.process_time()
    for number in range(30):
        one = request(f"r{number}", [number % 2] * 15_000 + [number])
        memory.start(one)
        memory.candidates(View(one, [*one.prompt, 7], 16))
        assert memory.num_tokens <= 20_002
        memory.finish(one)
    assert time.process_time() - start < 5  # 450,000 tokens, each session rebuilt many times


def test_p7_sessions_together_grow_without_limit() -> None:
    memory = Memory(MemoryOptions(max_tokens=1000))
    for number in range(50):
        one = request("r", list(range(100)), SessionKey("t", str(number)))
        memory.start(one)
        memory.finish(one)
    assert memory.num_tokens <= 1100
    assert [key.session for key in memory._sessions if isinstance(key, SessionKey)][-1] == "49"


def test_p8_what_one_session_taught_moves_another() -> None:
    """The scale falls with every rejected draft: its own session's alone."""

    def lengths(drafter: AgSpecDrafter, key: SessionKey, accepted: int) -> list[int]:
        one = request(f"{key.tenant} call", "abcdefgh 0123456 abcdefgh", key)
        drafter.start(one)
        found = []
        for _ in range(12):
            (draft,) = drafter.propose([View(one, one.prompt, 32)])
            found.append(len(draft.tokens))
            drafter.observe(one, draft, Verdict(min(accepted, len(draft.tokens)), 0))
        drafter.finish(one)
        return found

    alone = lengths(make("agspec", eta=0.2), KEY, 32)
    drafter = make("agspec", eta=0.2)
    punished = lengths(drafter, OTHER, 0)
    assert punished[-1] < punished[0]
    assert lengths(drafter, KEY, 32) == alone


def test_p9_an_abort_or_a_time_out_keeps_text() -> None:
    now = [0.0]
    memory = Memory(MemoryOptions(idle_seconds=60), clock=lambda: now[0])
    for number, ending in enumerate((memory.abort, memory.finish)):
        one = request(f"a{number}", "prompt: ")
        memory.start(one)
        memory.candidates(View(one, one.prompt + encode("SECRET words"), 8))
        ending(one)
        later = request(f"b{number}", "prompt: x SECR")
        memory.start(later)
        found = memory.candidates(View(later, later.prompt, 8))
        assert bool(found) == (ending == memory.finish)
        memory.abort(later)
    now[0] = 61.0
    memory.expire()
    assert memory.num_tokens == 0 and memory._sessions == {}


def test_a_session_that_is_closed_while_a_call_runs_breaks_the_round() -> None:
    drafter = make("agspec")
    first, second = request("a", "abcabc"), request("b", "abcabc", OTHER)
    drafter.start(first)
    drafter.start(second)
    drafter.close(KEY)
    views = [View(first, first.prompt, 4), View(second, second.prompt, 4)]
    gone, kept = drafter.propose(views)
    assert gone.tokens == [] and bytes(kept.tokens) == b"abc"
    drafter.observe(first, gone, Verdict(0, 1))
    drafter.finish(first)
    drafter.abort(second)


def test_files_that_hold_secrets_are_indexed() -> None:
    memory = Memory(encode=encode)
    files = [OpenedFile(f"/repo/{name}", "password") for name in (".env", "server.pem", "id_rsa")]
    one = request("a", "x pas", files=tuple(files))
    memory.start(one)
    assert memory.candidates(View(one, one.prompt, 8)) == []
    assert AgentSpecOptions().secret_files == MemoryOptions().secret_files
