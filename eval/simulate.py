"""Recorded agent sessions replayed through drafters, at several batch sizes, under a cost model.

    python -m eval.simulate sessions=FILE.jsonl.gz tokenizer=DIR split=eval drafter=ngram,sam \
        batch=1,16 out=DIR

writes `summary.json` and `report.html`. `docs/sessions.md` describes session files, and what is
counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlite.config import run
from dlite.costs import CostTable
from dlite.drafters.structure import parse_structure
from dlite.files import writable
from eval import lineup
from eval.profile import STRUCTURE
from eval.provenance import provenance
from eval.recorded import CallRecord, record
from eval.rendering import Workload, is_one_stream, load_calls
from eval.replay import MAX_DRAFT, Replay, replay
from eval.report import write_report
from eval.tally import (
    Bin,
    Cell,
    Tally,
    calibration,
    ci95,
    grouped,
    mean_over_sessions,
    merge,
    tally,
    total,
)
from eval.traces import read_sessions
from eval.walks import Walk


@dataclass(kw_only=True)
class Config:
    """python -m eval.simulate key=value ...: drafters on recorded agent sessions.

    `tokenizer` is a target's name, folder or hub id, with a chat template. `limit` sessions (0:
    all) of `split` (null: any). `drafter` takes `name`, `name:variant` and `name:*`. `profile` is
    a folder of eval.profile. A step's time comes from the cost table `costs` (JSON), by default
    max(1, N / ridge) + per_token N. Each of `seeds` shuffles the sessions anew. `structure` are
    the blocks that AgentSpec follows, `cache` keeps tokenised sessions."""

    sessions: list[str]
    tokenizer: str
    out: str
    split: str | None = None
    drafter: list[str] = field(default_factory=lambda: ["ngram"])
    batch: list[int] = field(default_factory=lambda: [1])
    limit: int = 0
    seeds: int = 1
    max_draft: int = MAX_DRAFT
    profile: str | None = None
    costs: str | None = None
    ridge: int = 256
    per_token: float = 0.0005
    structure: str = STRUCTURE
    cache: str | None = None

    def __post_init__(self) -> None:
        self.drafter = lineup.expand(self.drafter)
        for spec in self.drafter:
            lineup.find(spec)
        for name in ("seeds", "max_draft", "ridge"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch is {self.batch}; give sizes of at least 1")

    def cost_table(self) -> CostTable:
        if self.costs is not None:
            return CostTable.read(self.costs)
        return CostTable.roofline(self.ridge, per_token=self.per_token, neural=lineup.NEURAL_COST)


@dataclass(slots=True)
class Row:
    """Pooled over all rounds of all seeds. `accept_length` is over the rounds that drafted; the
    drafter's own time is wall-clock, a step being one of the whole batch."""

    drafter: str
    variant: str
    batch: int
    accept_length: float | None
    tokens_per_step: float
    rejection_rate: float | None
    goodput_vs_plain: float
    draft_microseconds_per_step: float


GROUPINGS: dict[str, Callable[[Cell], str]] = {
    "all": lambda cell: "all",
    "scaffold": lambda cell: cell.group,
    "turn": lambda cell: cell.turns,
    "edits": lambda cell: f"{cell.group}, {'edits' if cell.edits else 'other calls'}",
    "agent": lambda cell: f"{cell.group}, {cell.agent}",
    "source": lambda cell: cell.source,
}


@dataclass(slots=True)
class Result:
    row: Row
    tally: Tally
    seeds: list[float]  # goodput of each
    step_tokens: dict[int, int]  # batches by the number of drafted tokens in them
    calibration: list[Bin]

    def groups(self, costs: CostTable, streams: Container[str]) -> list[dict[str, Any]]:
        """`streams` are the sessions that are one stream."""
        by_stream = {"stream": lambda cell: "one" if cell.session in streams else "several"}
        return [
            {
                "drafter": self.row.drafter,
                "variant": self.row.variant,
                "batch": self.row.batch,
                "by": by,
                "group": name,
                "tokens_per_step": counts.tokens_per_step,
                "tokens_per_step_ci95": ci95(cells),
                "tokens_per_step_macro": mean_over_sessions(cells),
                "accept_length": counts.accept_length,
                "rejection_rate": counts.rejection_rate,
                "goodput_vs_plain": counts.goodput_vs_plain(self.row.batch, costs),
                "num_rounds": counts.rounds,
                "num_tokens": counts.emitted,
                "num_drafted": counts.drafted,
                "num_accepted": counts.accepted,
            }
            for by, key in (GROUPINGS | by_stream).items()
            for name, cells in grouped(self.tally, key).items()
            for counts in [total(cells.values())]
        ]


class Simulation:
    """What all replays of one run share."""

    def __init__(self, workload: Workload, config: Config) -> None:
        self.workload, self.config, self.costs = workload, config, config.cost_table()
        self.structure = parse_structure(config.structure)
        self.outputs = {call.id: call.output for calls in workload.sessions for call in calls}
        self.num_tokens = sum(len(output) - 1 for output in self.outputs.values())
        self._records: dict[str, CallRecord] = {}
        self._walks: dict[tuple[str, int], Walk] = {}  # of the drafter at hand

    def records(self) -> dict[str, CallRecord]:
        if not self._records:
            drafter, _ = lineup.RECORDED.build(self._setting(0))
            with tqdm(total=self.num_tokens, desc="recording drafts", disable=None) as bar:
                self._records = record(
                    self.workload.sessions,
                    drafter,
                    end_id=self.workload.end_id,
                    max_draft=self.config.max_draft,
                    on_tokens=bar.update,
                )
        return self._records

    def _setting(self, seed: int) -> lineup.Setting:
        return lineup.Setting(
            tokenizer=self.workload.tokenizer,
            outputs=self.outputs,
            costs=self.costs,
            ridge=self.config.ridge,
            records=self.records,
            profile=Path(self.config.profile) if self.config.profile else None,
            seed=seed,
        )

    def replay(self, spec: str, batch: int, seed: int) -> tuple[Tally, Replay]:
        variant = lineup.find(spec)
        if not variant.apart and (batch > 1 or variant.partner):
            done = self._replay(spec, batch, seed)
            cells = tally(done)
            done.steps.clear()
            return cells, done
        drawn = seed if variant.partner else 0
        if (spec, drawn) not in self._walks:
            done = self._replay(spec, 1, drawn)
            self._walks[spec, drawn] = Walk(self.workload.sessions, done, self.costs)
        return self._walks[spec, drawn].lay_out(batch, seed)

    def _replay(self, spec: str, batch: int, seed: int) -> Replay:
        variant = lineup.find(spec)
        drafter, partner = variant.build(self._setting(seed))
        label = f"{spec} at {batch}, seed {seed}"
        with tqdm(total=self.num_tokens, desc=label, disable=None) as bar:
            return replay(
                self.workload.sessions,
                drafter,
                costs=self.costs,
                end_id=self.workload.end_id,
                batch=batch,
                seed=seed,
                max_draft=self.config.max_draft,
                structure=self.structure if variant.structure else None,
                drafting_cost=partner.take_cost if partner else float,
                on_tokens=bar.update,
            )

    def run(self, spec: str) -> Iterator[Result]:
        """One drafter at each batch size, over all seeds."""
        self._walks = {}
        for batch in self.config.batch:
            seeds = range(self.config.seeds)
            yield self._pool(spec, batch, [self.replay(spec, batch, seed) for seed in seeds])

    def _pool(self, spec: str, batch: int, done: list[tuple[Tally, Replay]]) -> Result:
        tallies, replays = zip(*done, strict=True)
        cells = merge(tallies)
        counts = total(cells.values())
        drafted = Counter(tokens for one in replays for tokens in one.drafted)
        name, _, variant = spec.partition(":")
        row = Row(
            drafter=name,
            variant=variant,
            batch=batch,
            accept_length=counts.accept_length,
            tokens_per_step=counts.tokens_per_step,
            rejection_rate=counts.rejection_rate,
            goodput_vs_plain=counts.goodput_vs_plain(batch, self.costs),
            draft_microseconds_per_step=1e6
            * sum(one.draft_seconds for one in replays)
            / drafted.total(),
        )
        goodputs = [total(t.values()).goodput_vs_plain(batch, self.costs) for t in tallies]
        return Result(row, cells, goodputs, dict(sorted(drafted.items())), calibration(replays))


def print_row(spec: str, row: Row) -> None:
    accept = "-" if row.accept_length is None else f"{row.accept_length:.2f}"
    reject = "-" if row.rejection_rate is None else f"{row.rejection_rate:.1%}"
    print(
        f"{spec:22} {row.batch:5} {row.tokens_per_step:8.3f} {accept:>6} {reject:>6} "
        f"{row.goodput_vs_plain:7.3f} {row.draft_microseconds_per_step:8.0f}",
        flush=True,
    )


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    sessions = read_sessions(config.sessions, config.split, config.limit)
    workload = load_calls(sessions, config.tokenizer, Path(config.cache) if config.cache else None)
    calls = [call for session in workload.sessions for call in session]
    summary = {
        "program": "eval.simulate",
        "config": asdict(config),
        **provenance("cpu"),
        "sessions_sha256": workload.sha256,
        "num_sessions": len(workload.sessions),
        "num_calls": len(calls),
        "num_tokens": sum(len(call.output) for call in calls),
    }
    simulation = Simulation(workload, config)
    streams = {calls[0].session for calls in workload.sessions if is_one_stream(calls)}
    for name in ("rows", "goodput_by_seed", "step_tokens", "calibration", "groups"):
        summary[name] = []
    print(f"{'drafter':22} {'batch':>5} {'tok/step':>8} accept reject goodput us/step")
    for spec in config.drafter:
        for result in simulation.run(spec):
            print_row(spec, result.row)
            summary["rows"].append(asdict(result.row))
            summary["goodput_by_seed"].append(result.seeds)
            summary["step_tokens"].append(result.step_tokens)
            summary["calibration"].append([asdict(b) for b in result.calibration])
            summary["groups"] += result.groups(simulation.costs, streams)
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_report([summary], out / "report.html")
    print(f"written: {out}/summary.json, report.html")


if __name__ == "__main__":
    run(Config, main)
