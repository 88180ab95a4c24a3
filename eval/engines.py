"""How fast the retrieval engines are, side by side in one run.

    python -m eval.engines out=DIR

writes `summary.json` with a row per engine: ours in C++ and in Python, and arctic-inference's
suffix tree where that is installed, through the calls that a server makes. Every figure is the
best of `runs`, in CPU time of the calling thread: what else the machine does hardly counts.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dlite.config import run
from dlite.files import writable
from dlite.loading import load_tokenizer
from dlite.retrieval import automaton, base, chain
from dlite.retrieval.base import Rule
from dlite.retrieval.suffix_tree import INSTALL
from eval.provenance import provenance

CONTEXT = 64  # tokens that arctic-inference is given to match
STDLIB = [sysconfig.get_paths()["stdlib"]]
ROUNDS = 20  # steps whose median is one measurement
TURN = 400  # tokens that a session is extended by, one call each, for one measurement


@dataclass(kw_only=True)
class Config:
    """python -m eval.engines key=value ...: speed and memory of retrieval engines.

    `text` are files or folders (of .py files; default: Python's standard library), cut into
    `tokens` tokens a session by `tokenizer` (a target's name, or a folder with tokenizer.json).
    A draft has `num_draft` tokens."""

    out: str
    text: list[str] = field(default_factory=list)
    tokenizer: str = "smollm2-135m"
    tokens: int = 65_536
    num_draft: int = 16
    batch: int = 64
    runs: int = 7

    def __post_init__(self) -> None:
        for name in ("tokens", "num_draft", "batch", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    make: Callable[[], Any]
    step: Callable[..., list[base.Continuation]] | None  # one call for a batch
    max_sessions: int  # measured at a time: slow engines needn't be built 64 times
    votes: bool = True

    def find(self, indexes: list[Any], rule: Rule, num_draft: int) -> list[base.Continuation]:
        if self.step:
            return self.step(indexes, [[]] * len(indexes), rule, num_draft)
        return [index.find(rule, num_draft) for index in indexes]


@dataclass(slots=True)
class Row:
    """`extend` is a call of one token, in one session. `draft` copies the most recent occurrence,
    `vote` the most frequent; per draft, in a call for the whole batch. `batch` is such a call that
    extends each session by a token, too. `constant` is building from one token repeated, `free`
    closing a session. `ratios_to_arctic`: how many times better than arctic-inference here."""

    engine: str
    build_tokens_per_second: float
    extend_microseconds: float
    draft_microseconds: float
    vote_microseconds: float | None
    batch_microseconds: float | None
    bytes_per_token: float
    allocated_bytes_per_token: float
    constant_milliseconds: float
    free_milliseconds: float
    ratios_to_arctic: dict[str, float] = field(default_factory=dict)


class Arctic:
    """One request of arctic-inference's cache: the calls that vLLM makes, with their defaults."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # pyright: ignore

        self.cache = SuffixDecodingCache(max_tree_depth=CONTEXT)
        self.stream: list[int] = []
        self.size = 0

    def extend(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        if self.size == 0:
            self.cache.start_request(0, tokens)
        else:
            self.cache.add_active_response(0, tokens)
        self.stream = (self.stream + list(map(int, tokens[-CONTEXT:])))[-CONTEXT:]
        self.size += len(tokens)

    def find(self, rule: int, max_tokens: int) -> base.Continuation:
        found = self.cache.speculate(0, self.stream, max_tokens)
        return base.Continuation(found.token_ids, found.match_len, 0, 0, -1, 0)

    def used_bytes(self) -> int:
        return self.cache._local_trees[0].estimate_memory()

    allocated_bytes = used_bytes

    def close(self) -> None:
        self.cache.stop_request(0)


def engines() -> list[Engine]:
    found = []
    if find_spec("dlite.retrieval._native"):
        from dlite.retrieval import _native

        found.append(Engine("automaton", _native.Automaton, _native.step, 64))
        found.append(Engine("chain", _native.HashChain, _native.step, 64))
    else:
        print("the native extension isn't built: only its twins are measured", file=sys.stderr)
    found.append(Engine("automaton (Python)", automaton.Automaton, None, 2))
    found.append(Engine("chain (Python)", chain.HashChain, None, 2))
    if find_spec("arctic_inference"):
        found.append(Engine("arctic", Arctic, None, 4, votes=False))
    else:
        print(f"no row for arctic-inference: {INSTALL}", file=sys.stderr)
    return found


class Bench:
    """The sessions of one engine. A `run` measures every figure once; between two runs the other
    engines have theirs, so that a slow second of the machine can't spoil all runs of a figure."""

    def __init__(self, engine: Engine, text: NDArray[np.int32], config: Config) -> None:
        self.engine, self.config = engine, config
        self.text = text[: config.tokens]
        self.constant = np.full(config.tokens, 7, dtype=np.int32)
        self.indexes, futures = [], []
        for number in range(min(config.batch, engine.max_sessions)):
            window = session_text(text, number, config)
            self.indexes.append(engine.make())
            self.indexes[-1].extend(window[: config.tokens])
            futures.append(window[config.tokens :].tolist())
        self.steps = zip(*futures, strict=True)
        self.turns = iter(futures[0][: -config.runs * TURN - 1 : -1])
        self.best: dict[str, float] = {}

    def run(self) -> None:
        engine, sessions, num_draft = self.engine, len(self.indexes), self.config.num_draft
        self._build("build", self.text)
        self._build("constant", self.constant)
        tokens = [[next(self.turns)] for _ in range(TURN)]
        extend = seconds(lambda: [self.indexes[0].extend(token) for token in tokens])
        self._note("extend", extend / TURN)
        for rule in (Rule.RECENT, Rule.VOTE) if engine.votes else (Rule.RECENT,):
            times = []
            for _ in range(ROUNDS):
                self._advance()
                times.append(seconds(lambda r=rule: engine.find(self.indexes, r, num_draft)))
            self._note(rule.name, median(times) / sessions)
        if sessions == self.config.batch and engine.step:
            times = []
            for _ in range(ROUNDS):
                args = self.indexes, [[t] for t in next(self.steps)], Rule.RECENT, num_draft
                times.append(seconds(lambda a=args, step=engine.step: step(*a)))
            self._note("batch", median(times))

    def _build(self, figure: str, tokens: NDArray[np.int32]) -> None:
        index = self.engine.make()
        self._note(figure, seconds(lambda: index.extend(tokens)))
        if figure == "build":
            self.best |= {"used": index.used_bytes(), "allocated": index.allocated_bytes()}
            self._note("free", seconds(index.close))
        else:
            index.close()

    def _advance(self) -> None:
        for index, token in zip(self.indexes, next(self.steps), strict=True):
            index.extend([token])

    def _note(self, figure: str, value: float) -> None:
        self.best[figure] = min(value, self.best.get(figure, value))

    def row(self) -> Row:
        best, size = self.best, self.config.tokens
        return Row(
            engine=self.engine.name,
            build_tokens_per_second=size / best["build"],
            extend_microseconds=1e6 * best["extend"],
            draft_microseconds=1e6 * best["RECENT"],
            vote_microseconds=1e6 * best["VOTE"] if "VOTE" in best else None,
            batch_microseconds=1e6 * best["batch"] if "batch" in best else None,
            bytes_per_token=best["used"] / size,
            allocated_bytes_per_token=best["allocated"] / size,
            constant_milliseconds=1e3 * best["constant"],
            free_milliseconds=1e3 * best["free"],
        )


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def session_text(text: NDArray[np.int32], number: int, config: Config) -> NDArray[np.int32]:
    """A window of the text that starts elsewhere for each session, and the tokens to come."""
    size = config.tokens + future_tokens(config)
    start = number * 9_973 % max(1, len(text) - size)
    return text[start : start + size]


def future_tokens(config: Config) -> int:
    return config.runs * (3 * ROUNDS + TURN)


def read_text(config: Config) -> NDArray[np.int32]:
    """Raises ValueError where the text is too short for a session."""
    tokenizer = load_tokenizer(config.tokenizer).backend_tokenizer
    wanted = config.tokens + future_tokens(config)
    tokens: list[int] = []
    for file in text_files(config.text or STDLIB):
        tokens += tokenizer.encode(file.read_text(errors="replace"), add_special_tokens=False).ids
        if len(tokens) > 8 * wanted:
            break
    if len(tokens) < wanted:
        raise ValueError(
            f"the text has {len(tokens)} tokens, a session needs {wanted}; give more files in "
            "text=, or smaller tokens="
        )
    return np.array(tokens, dtype=np.int32)


def text_files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(path.glob("*.py"))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"text has {str(path)!r}, which is no file or folder")


def compare(rows: list[Row]) -> None:
    arctic = next((row for row in rows if row.engine == "arctic"), None)
    for row in rows:
        if arctic is None or row is arctic:
            continue
        for name, value in asdict(row).items():
            other = getattr(arctic, name)
            if isinstance(value, float) and isinstance(other, float) and value and other:
                rate = name == "build_tokens_per_second"
                row.ratios_to_arctic[name] = value / other if rate else other / value


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    text = read_text(config)
    benches = [Bench(engine, text, config) for engine in engines()]
    for _ in tqdm(range(config.runs), "runs", disable=None):
        for bench in benches:
            bench.run()
    rows = [bench.row() for bench in benches]
    compare(rows)
    summary = {"rows": [asdict(row) for row in rows], "config": asdict(config)}
    summary["provenance"] = provenance("cpu")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for row in rows:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    run(Config, main)
