"""What drafting adds to a step: the retrieval drafters on long contexts, in one run.

    python -m eval.drafting out=DIR

Requests walk through real text, each in a session of its own with an opened file, beside a static
corpus and with blocks. A step is a proposal for the whole batch and what is learnt from its
verdicts. Every figure is the median of 20 steps, the best of `runs`, in CPU time of the calling
thread; `engine` is the bare call that extends 64 indexes by a token and drafts 16 from each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dlite import retrieval
from dlite.config import run
from dlite.costs import CostTable
from dlite.drafters.agentspec import AgentSpecDrafter, AgentSpecOptions
from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions
from dlite.drafters.base import Drafter
from dlite.drafters.copying import CopyDrafter, CopyOptions
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.drafters.structure import parse_structure
from dlite.drafters.survival import SurvivalDrafter, SurvivalOptions
from dlite.files import writable
from dlite.hybrid import Hybrid
from dlite.loading import load_tokenizer
from dlite.planner import Planner
from dlite.survival import shipped_prior
from dlite.tokens import token_bytes
from dlite.types import AgentContext, Draft, OpenedFile, Request, SessionKey, Verdict, View
from eval import engines
from eval.provenance import provenance

ROUNDS = 20
FILE_CHARACTERS = 20_000
BLOCKS = json.dumps([[['"""', '"""']], [["<tool_call>", "</tool_call>"]]])
ROOFLINE = CostTable.roofline(256, per_token=0.0005)


@dataclass(kw_only=True)
class Config:
    """python -m eval.drafting key=value ...: microseconds that drafting takes per step.

    `text` (files or folders; default: Python's standard library) gives each session `tokens`
    tokens of context, and the static corpus `corpus` of them; `blocks` gives requests a
    structure. A draft has at most `num_draft` tokens."""

    out: str
    text: list[str] = field(default_factory=list)
    tokenizer: str = "smollm2-135m"
    tokens: int = 65_536
    corpus: int = 262_144
    num_draft: int = 16
    batch: list[int] = field(default_factory=lambda: [1, 16, 64])
    drafters: list[str] = field(
        default_factory=lambda: ["sam", "agentspec", "agspec", "survival", "hybrid"]
    )
    blocks: bool = True
    runs: int = 7

    def __post_init__(self) -> None:
        for name in ("tokens", "corpus", "num_draft", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch is {self.batch}; give sizes of at least 1")
        for name in self.drafters:
            if name not in MAKERS:
                raise ValueError(f"drafters has {name!r}; choose from {', '.join(MAKERS)}")

    @property
    def future(self) -> int:
        return 1 + self.runs * ROUNDS * len(self.batch) * (self.num_draft + 1)


@dataclass(frozen=True, slots=True)
class Resources:
    tokenizer: Any
    table: Any
    corpus: Any

    def memory(self, options: MemoryOptions, *, static: bool = False) -> Memory:
        def encode(text: str) -> list[int]:
            return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

        corpus = self.corpus if static else None
        return Memory(options, encode=encode, table=self.table, corpus=corpus)


def _sam(resources: Resources) -> Drafter:
    options = CopyOptions()
    return CopyDrafter("sam", resources.memory(options), options)


def _agentspec(resources: Resources) -> Drafter:
    options = AgentSpecOptions(mode="class")
    return AgentSpecDrafter([resources.memory(one) for one in options.searched()], options)


def _agspec(resources: Resources) -> Drafter:
    options = AgSpecOptions()
    return AgSpecDrafter(resources.memory(options, static=True), options)


def _survival(resources: Resources) -> Drafter:
    options = SurvivalOptions()
    return SurvivalDrafter(resources.memory(options, static=True), options, shipped_prior())


def _hybrid(resources: Resources) -> Drafter:
    return Hybrid([_survival(resources)], Planner(ROOFLINE))


MAKERS: dict[str, Callable[[Resources], Drafter]] = {
    "sam": _sam,
    "agentspec": _agentspec,
    "agspec": _agspec,
    "survival": _survival,
    "hybrid": _hybrid,
}


@dataclass(slots=True)
class Row:
    """`drafted` and `accepted` are tokens per request and step; `ratio_to_engine` compares the
    whole step with the bare engine's."""

    drafter: str
    batch: int
    propose_microseconds: float
    observe_microseconds: float
    step_microseconds: float
    drafted: float
    accepted: float
    ratio_to_engine: float | None = None


class Bench:
    """The running requests of one drafter; a run measures each batch size once."""

    def __init__(
        self, name: str, resources: Resources, texts: Sequence[NDArray[np.int32]], config: Config
    ) -> None:
        self.name, self.config = name, config
        self.drafter = MAKERS[name](resources)
        structure = parse_structure(BLOCKS) if config.blocks else None
        self.requests, self.tokens, self.futures = [], [], []
        for number, text in enumerate(texts):
            prompt = text[: config.tokens].tolist()
            shown = resources.tokenizer.decode(prompt[-FILE_CHARACTERS // 3 :])[-FILE_CHARACTERS:]
            agent = AgentContext(
                "agent", "query", structure, (OpenedFile(f"file{number}.py", shown),)
            )
            key = SessionKey("tenant", str(number))
            request = Request(f"{name}{number}", prompt, 2**20, session=key, agent=agent)
            self.drafter.start(request)
            self.requests.append(request)
            self.futures.append(text[config.tokens :].tolist())
            self.tokens.append([*prompt, self.futures[-1][0]])
        self.done = [1] * len(texts)
        self.rows: dict[int, Row] = {}

    def run(self) -> None:
        for batch in self.config.batch:
            steps = [self._step(batch) for _ in range(ROUNDS)]
            propose, observe, drafted, accepted = map(list, zip(*steps, strict=True))
            row = Row(
                self.name,
                batch,
                1e6 * median(propose),
                1e6 * median(observe),
                1e6 * median(map(sum, zip(propose, observe, strict=True))),
                sum(drafted) / batch / ROUNDS,
                sum(accepted) / batch / ROUNDS,
            )
            best = self.rows.setdefault(batch, row)
            if row.step_microseconds < best.step_microseconds:
                self.rows[batch] = row

    def _step(self, batch: int) -> tuple[float, float, int, int]:
        requests, drafts, verdicts = self.requests[:batch], [], []
        views = [
            View(request, tokens, self.config.num_draft)
            for request, tokens in zip(requests, self.tokens, strict=False)
        ]
        propose = engines.seconds(lambda: drafts.extend(self.drafter.propose(views)))
        for row, draft in enumerate(drafts):
            verdicts.append(self._verify(row, draft))

        def observe() -> None:
            for request, draft, verdict in zip(requests, drafts, verdicts, strict=True):
                self.drafter.observe(request, draft, verdict)

        return (
            propose,
            engines.seconds(observe),
            sum(len(draft.tokens) for draft in drafts),
            sum(verdict.num_accepted for verdict in verdicts),
        )

    def _verify(self, row: int, draft: Draft) -> Verdict:
        done, future = self.done[row], self.futures[row]
        accepted = 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == future[done + accepted]:
            accepted += 1
        self.done[row] = done + accepted + 1
        self.tokens[row] += future[done : self.done[row]]
        return Verdict(accepted, future[done + accepted])


class EngineBench:
    """The bare call for the largest batch: what no drafter can undercut."""

    def __init__(self, texts: Sequence[NDArray[np.int32]], config: Config) -> None:
        self.num_draft = config.num_draft
        self.indexes = [retrieval.Automaton() for _ in texts]
        for index, text in zip(self.indexes, texts, strict=True):
            index.extend(text[: config.tokens])
        self.steps = zip(*(text[config.tokens :].tolist() for text in texts), strict=True)
        self.best = float("inf")

    def run(self) -> None:
        times = []
        for _ in range(ROUNDS):
            args = self.indexes, [[t] for t in next(self.steps)], 1, self.num_draft
            times.append(engines.seconds(lambda a=args: retrieval.step(*a)))
        self.best = min(self.best, 1e6 * median(times))


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    tokenizer = load_tokenizer(config.tokenizer)
    size = config.tokens + config.future
    text = np.array(read_text(config, tokenizer, size + config.corpus), dtype=np.int32)
    corpus = retrieval.Automaton()
    corpus.extend(text[: config.corpus])
    corpus.end_segment()
    frozen: Any = retrieval.Frozen(corpus.freeze())
    resources = Resources(tokenizer, token_bytes(tokenizer), frozen)
    starts = np.linspace(config.corpus, len(text) - size, max(config.batch), dtype=int)
    texts = [text[start : start + size] for start in starts]
    engine = EngineBench(texts, config)
    benches = [Bench(name, resources, texts, config) for name in config.drafters]
    for _ in tqdm(range(config.runs), "runs", disable=None):
        for bench in (engine, *benches):
            bench.run()
    rows = [row for bench in benches for row in bench.rows.values()]
    for row in rows:
        if row.batch == max(config.batch):
            row.ratio_to_engine = row.step_microseconds / engine.best
    summary = {"rows": [asdict(row) for row in rows], "engine_microseconds": engine.best}
    summary |= {"config": asdict(config), "provenance": provenance("cpu")}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({"engine_microseconds": engine.best}))
    for row in rows:
        print(json.dumps(asdict(row)))


def read_text(config: Config, tokenizer: Any, wanted: int) -> list[int]:
    """Raises ValueError where the text is too short."""
    tokens: list[int] = []
    for file in engines.text_files(config.text or engines.STDLIB):
        tokens += tokenizer.backend_tokenizer.encode(
            file.read_text(errors="replace"), add_special_tokens=False
        ).ids
        if len(tokens) > 3 * wanted:
            return tokens
    if len(tokens) < wanted:
        raise ValueError(
            f"the text has {len(tokens)} tokens, {wanted} are needed; give more files in text=, or "
            "smaller tokens= or corpus="
        )
    return tokens


if __name__ == "__main__":
    run(Config, main)
