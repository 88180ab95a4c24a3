"""What is left of an index: nothing, and that many of them leave nothing either."""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from dlite.retrieval.base import Rule

native = pytest.importorskip(
    "dlite.retrieval._native", reason="the native extension isn't built: Python can't wipe memory"
)
named = pytest.mark.parametrize("make", [native.Automaton, native.HashChain])
CANARY = [0x5EC2E7 + i * 7919 for i in range(40)]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def held_memory(index: Any) -> bytes:
    return b"".join(ctypes.string_at(*held) for held in index.memory_ranges() if held[1])


@named
@pytest.mark.parametrize("filling", [0, 200_000])
def test_a_secret_is_gone_from_memory_before_it_is_returned(make: Any, filling: int) -> None:
    """200,000 tokens more: regions have moved, tables grown and edges been copied meanwhile."""
    index = make()
    index.extend(CANARY)
    index.extend([token % 5000 + token // 7 % 3 for token in range(filling)])
    index.extend(CANARY)
    pattern = array("i", CANARY).tobytes()
    memory = held_memory(index)
    assert pattern in memory
    assert memory.count(CANARY[3].to_bytes(4, "little")) >= 2
    index.wipe()
    assert not any(held_memory(index))
    with pytest.raises(ValueError, match="this index is closed"):
        index.find(Rule.RECENT, 8)
    index.close()


@named
def test_a_new_index_knows_nothing_of_the_one_before(make: Any) -> None:
    for _ in range(50):
        index = make()
        index.extend(CANARY)
        assert index.find(Rule.RECENT, 8).match_length == 0
        cursor = index.cursor()
        for token in CANARY[:5]:
            cursor.extend([token])
        assert cursor.find(Rule.RECENT, 8).tokens == CANARY[5:13]
        index.close()


@named
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_ten_thousand_sessions_leave_the_process_as_large_as_it_was(make: Any) -> None:
    tokens = [token * 31 % 997 for token in range(500)]

    def session() -> None:
        index = make()
        index.extend(tokens)
        cursor = index.cursor()
        cursor.extend(tokens[:70])
        native.step([index, cursor], [tokens[:3], tokens[:3]], Rule.VOTE, 16)
        index.close()

    for _ in range(200):
        session()
    before = resident_bytes()
    for _ in range(10_000):
        session()
    assert resident_bytes() <= before * 1.05


@named
def test_other_threads_run_while_an_index_is_built(make: Any) -> None:
    """An engine that kept the GIL would stop the serving loop for as long as a prompt takes."""
    index = make()
    tokens = array("i", (token * 2654435761 % 100_003 for token in range(1_000_000)))
    started = threading.Event()

    def build() -> None:
        started.set()
        for _ in range(4):
            index.extend(memoryview(tokens))

    thread = threading.Thread(target=build)
    thread.start()
    started.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10


@named
def test_threads_that_share_a_corpus_take_turns(make: Any) -> None:
    """Also in opposite order, which would lock each other out; and against a close meanwhile."""
    first, second = make(), make()
    for index in (first, second):
        index.extend(list(range(50)) * 3)
    sources = [first, second, first.cursor(), second.cursor()]
    failures: list[Exception] = []

    def work(order: list[Any]) -> None:
        try:
            for turn in range(400):
                native.step(order, [[turn % 50]] * 4, Rule.VOTE, 8)
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(o,)) for o in (sources, sources[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(first) == len(second) == 150 + 2 * 400
    closers = [threading.Thread(target=work, args=(sources,)), threading.Thread(target=first.close)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    assert [str(error) for error in failures] in (
        [],
        ["this index is closed; open a new one"],
    )


def test_a_batch_with_too_few_token_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="1 sources and 0 lists of tokens; give one list per"):
        native.step([native.Automaton()], [], Rule.RECENT, 8)
