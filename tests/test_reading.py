"""A step in one native call against its Python twin, which looks call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_memory import encode, words

from dlite import retrieval
from dlite.costs import CostTable
from dlite.drafters.agentspec import AgentSpecDrafter, AgentSpecOptions
from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions
from dlite.drafters.copying import CopyDrafter, CopyOptions
from dlite.drafters.marks import Marks
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.drafters.structure import parse_structure
from dlite.drafters.survival import SurvivalDrafter, SurvivalOptions
from dlite.hybrid import Hybrid
from dlite.planner import Planner
from dlite.retrieval import Automaton, Frozen
from dlite.survival import Prior, Survival, native_survival, shipped_prior
from dlite.tokens import TokenBytes, TokenKind
from dlite.types import (
    AgentContext,
    Draft,
    Evidence,
    OpenedFile,
    Request,
    Sampling,
    SessionKey,
    SourceClass,
    Verdict,
    View,
)

pytestmark = pytest.mark.skipif(not retrieval.NATIVE, reason="there is no native side to compare")
BLOCKS = parse_structure('[[["(", ")"]], [["ab", "ba"]]]')
TABLE = TokenBytes.of({byte: (bytes([byte]), TokenKind.TEXT) for byte in range(256)}, 256)
Text = Callable[[random.Random, int], list[int]]


def few_symbols(rng: random.Random, size: int) -> list[int]:
    symbols = encode("ab()")[: rng.randrange(1, 5)]
    return [rng.choice(symbols) for _ in range(size)]


def memory(options: MemoryOptions, native: bool) -> Memory:
    corpus = Automaton()
    rng = random.Random(9)
    for _ in range(20):
        corpus.extend([*words(rng, 60), *few_symbols(rng, 30)])
        corpus.end_segment()
    return Memory(
        options,
        encode=encode,
        table=TABLE,
        corpus=Frozen(corpus.freeze()),
        native=native,
    )


def survival(native: bool, **options: Any) -> SurvivalDrafter:
    chosen = SurvivalOptions(**options)
    return SurvivalDrafter(memory(chosen, native), chosen, shipped_prior())


def hybrid(native: bool, **options: Any) -> Hybrid:
    return Hybrid([survival(native)], Planner(CostTable.roofline(20, per_token=0.02), **options))


def agspec(native: bool, **options: Any) -> AgSpecDrafter:
    chosen = AgSpecOptions(**options)
    return AgSpecDrafter(memory(chosen, native), chosen)


def sam(native: bool, **options: Any) -> CopyDrafter:
    chosen = CopyOptions(**options)
    return CopyDrafter("sam", memory(chosen, native), chosen)


def agentspec(native: bool, **options: Any) -> AgentSpecDrafter:
    chosen = AgentSpecOptions(**options)
    return AgentSpecDrafter([memory(one, native) for one in chosen.searched()], chosen)


class World:
    """Sessions with calls that run at the same time, of agents that open files and blocks; all
    that happens, happens to both drafters."""

    def __init__(self, make: Callable[..., Any], text: Text, seed: int, options: dict[str, Any]):
        self.ours, self.twin = make(True, **options), make(False, **options)
        self.text, self.rng = text, random.Random(seed)
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.prompts = [text(self.rng, 40) for _ in range(3)]
        self.number, self.drafted = 0, 0

    def start(self) -> None:
        rng, self.number = self.rng, self.number + 1
        session = rng.randrange(len(self.prompts))
        shown = bytes(self.text(rng, 50)).decode("latin1")
        request = Request(
            f"call{self.number}",
            [*self.prompts[session], *self.text(rng, 9)],
            999,
            sampling=Sampling(rng.choice([0.0, 0.0, 1.0])),
            session=rng.choice([None, *[SessionKey("t", str(session))] * 5]),
            agent=AgentContext(
                rng.choice("xy"),
                rng.choice("qr"),
                rng.choice([None, BLOCKS]),
                rng.choice([(), (OpenedFile(f"f{self.number}.py", shown),)]),
            ),
        )
        for drafter in (self.ours, self.twin):
            drafter.start(request)
        self.running[request.id] = request, [*request.prompt, *self.text(rng, 1)]

    def step(self) -> None:
        batch = self.rng.sample([*self.running], self.rng.randrange(len(self.running) + 1))
        views = [View(*self.running[name], self.rng.randrange(20)) for name in batch]
        for view in views:
            if self.rng.random() < 0.2:
                view.tokens = tuple(view.tokens)
        drafts = self.ours.propose(views)
        for view, ours, twin in zip(views, drafts, self.twin.propose(views), strict=True):
            assert (ours.tokens, ours.source, ours.evidence) == (
                twin.tokens,
                twin.source,
                twin.evidence,
            )
            assert ours.survival == (twin.survival and pytest.approx(twin.survival, abs=1e-12))
            self.drafted += bool(ours.tokens)
            self.commit(view.request, ours, twin)

    def commit(self, request: Request, ours: Draft, twin: Draft) -> None:
        accepted = self.rng.randrange(len(ours.tokens) + 1)
        verdict = Verdict(accepted, self.text(self.rng, 1)[0])
        self.ours.observe(request, ours, verdict)
        self.twin.observe(request, twin, verdict)
        self.running[request.id][1].extend([*ours.tokens[:accepted], verdict.next_token])

    def end(self) -> None:
        request, tokens = self.running.pop(self.rng.choice([*self.running]))
        ending = self.rng.choice(["finish", "finish", "abort"])
        for drafter in (self.ours, self.twin):
            getattr(drafter, ending)(request)
        if request.session and ending == "finish":
            self.prompts[int(request.session.session)] = tokens[-400:]

    def close(self) -> None:
        key = SessionKey("t", str(self.rng.randrange(len(self.prompts))))
        for drafter in (self.ours, self.twin):
            drafter.close(key)


@pytest.mark.parametrize("text", [words, few_symbols])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (survival, {}),
        (survival, {"threshold": 0.3, "live_rule": "vote", "static_rule": "majority"}),
        (survival, {"engine": "chain", "history": "call", "workspace_rule": "first"}),
        (survival, {"history": "blocks", "max_session_tokens": 300}),
        (hybrid, {"guard": 0.0}),
        (hybrid, {}),
        (agspec, {}),
        (agspec, {"delta": 0, "num_draft": 9, "history": "own"}),
        (sam, {}),
        (sam, {"length": "agreed", "live_rule": "majority", "num_draft": 7}),
        (agentspec, {"mode": "class"}),
    ],
)
def test_a_batch_in_one_call_drafts_what_its_calls_would_one_by_one(
    make: Callable[..., Any], options: dict[str, Any], text: Text
) -> None:
    drafted = 0
    for seed in range(3):
        world = World(make, text, seed, options)
        for _ in range(150):
            event = world.rng.random()
            if event < 0.12 or not world.running:
                world.start()
            elif event < 0.2:
                world.end()
            elif event < 0.21:
                world.close()
            else:
                world.step()
        drafted += world.drafted
    assert drafted > 100


def test_a_sessions_own_curves_drift_from_the_twins() -> None:
    rng = random.Random(3)
    prior = Prior(np.array([[[[[3, 9]] * 9] * 4] * 10] * 6))
    ours, twin = native_survival(prior), Survival(prior)
    for _ in range(3000):
        support = rng.choice([1, 2, 3, 9])
        known = Evidence(
            SourceClass(rng.randrange(6)),
            rng.randrange(1, 70),
            support,
            rng.randrange(1, 1 + support),
        )
        drafted = rng.randrange(1, 80)
        accepted = rng.randrange(drafted + 1)
        ours.observe(known, drafted, accepted)
        twin.observe(known, drafted, accepted)
        assert ours.curve(known, 70) == pytest.approx(twin.curve(known, 70), abs=1e-12)


def test_marks_move_or_are_lost_when_text_is_cut_or_dropped() -> None:
    from dlite.retrieval import _native

    rng = random.Random(4)
    for _ in range(300):
        ours, twin, size = _native.Marks(), Marks(), 1
        ours.mark(0, 1)
        twin.mark(0, 1)
        for _ in range(20):
            action, number = rng.choice(["mark", "mark", "mark", "cut", "drop"]), rng.randrange(40)
            if action == "mark":
                size += number
                arguments = (size, rng.randrange(4))
            else:
                arguments = (min(number, size - 1),)
                size = size - arguments[0] if action == "drop" else arguments[0]
            if size < 1:
                break
            getattr(ours, action)(*arguments)
            getattr(twin, action)(*arguments)
            assert [ours.at(p) for p in range(size)] == [twin.at(p) for p in range(size)]
