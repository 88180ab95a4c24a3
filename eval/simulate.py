"""Recorded agent sessions replayed through drafters, at several batch sizes, under a cost model.

    python -m eval.simulate sessions=FILE.jsonl.gz tokenizer=DIR split=eval drafter=ngram,sam \
        batch=1,16 out=DIR

writes `summary.json`. `docs/sessions.md` describes session files and what is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlite.config import run
from dlite.drafters.base import Drafter
from dlite.drafters.ngram import NgramDrafter
from eval.provenance import provenance
from eval.references import AutomatonDrafter, PromptLookup, SessionAutomaton
from eval.rendering import Workload, load_calls
from eval.replay import MAX_DRAFT, CostModel, replay
from eval.tally import Cell, Tally, ci95, grouped, mean_over_sessions, merge, tally, total
from eval.traces import read_sessions


@dataclass(kw_only=True)
class Config:
    """python -m eval.simulate key=value ...: drafters on recorded agent sessions.

    `tokenizer` is a folder or hub id with a chat template. `limit` sessions (0: all) of `split`
    (null: any). `drafter` takes names and `name:variant`. Each of `seeds` shuffles the sessions
    anew. `cache` keeps tokenised sessions."""

    sessions: list[str]
    tokenizer: str
    out: str
    split: str | None = None
    drafter: list[str] = field(default_factory=lambda: ["ngram"])
    batch: list[int] = field(default_factory=lambda: [1])
    limit: int = 0
    seeds: int = 1
    max_draft: int = MAX_DRAFT
    cost: CostModel = field(default_factory=CostModel)
    cache: str | None = None

    def __post_init__(self) -> None:
        for spec in self.drafter:
            name, _, variant = spec.partition(":")
            if variant not in DRAFTERS.get(name, {}):
                known = ", ".join(f"{n}:{v}" if v else n for n in DRAFTERS for v in DRAFTERS[n])
                raise ValueError(f"unknown drafter {spec!r}; choose from {known}")
        for name, value in [("seeds", self.seeds), ("max_draft", self.max_draft)]:
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch is {self.batch}; give sizes of at least 1")


DRAFTERS: dict[str, dict[str, Callable[[], Drafter]]] = {
    "ngram": {"": NgramDrafter},
    "pld": {"": PromptLookup, "k5": lambda: PromptLookup(5)},
    "call": {"": AutomatonDrafter, "own": lambda: AutomatonDrafter(prompt=False)},
    "session": {"": SessionAutomaton},
}


@dataclass(slots=True)
class Row:
    """Pooled over all rounds of all seeds. `accept_length` is over the rounds that drafted."""

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

    def groups(self, cost: CostModel) -> list[dict[str, Any]]:
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
                "goodput_vs_plain": counts.goodput_vs_plain(self.row.batch, cost),
                "num_rounds": counts.rounds,
                "num_tokens": counts.emitted,
            }
            for by, key in GROUPINGS.items()
            for name, cells in grouped(self.tally, key).items()
            if (counts := total(cells.values()))
        ]


def simulate(workload: Workload, spec: str, batch: int, config: Config) -> Result:
    """One drafter at one batch size, over all seeds."""
    name, _, variant = spec.partition(":")
    tallies, seconds, num_batches = [], 0.0, 0
    num_tokens = sum(len(call.output) for calls in workload.sessions for call in calls)
    for seed in range(config.seeds):
        with tqdm(total=num_tokens, desc=f"{spec} at {batch}, seed {seed}", disable=None) as bar:
            done = replay(
                workload.sessions,
                DRAFTERS[name][variant](),
                end_id=workload.end_id,
                batch=batch,
                seed=seed,
                max_draft=config.max_draft,
                cost=config.cost,
                on_tokens=bar.update,
            )
        tallies.append(tally(done))
        seconds += done.draft_seconds
        num_batches += done.num_batches
    cells = merge(tallies)
    counts = total(cells.values())
    row = Row(
        drafter=name,
        variant=variant,
        batch=batch,
        accept_length=counts.accept_length,
        tokens_per_step=counts.tokens_per_step,
        rejection_rate=counts.rejection_rate,
        goodput_vs_plain=counts.goodput_vs_plain(batch, config.cost),
        draft_microseconds_per_step=1e6 * seconds / num_batches,
    )
    return Result(row, cells)


def main(config: Config) -> None:
    sessions = read_sessions(config.sessions, config.split, config.limit)
    cache = Path(config.cache) if config.cache else None
    workload = load_calls(sessions, config.tokenizer, cache)
    results = []
    print(f"{'drafter':20} {'batch':>5} {'tok/step':>8} {'accept':>6} {'reject':>6} {'goodput':>7}")
    for spec in config.drafter:
        for batch in config.batch:
            result = simulate(workload, spec, batch, config)
            results.append(result)
            row = result.row
            accept, reject = row.accept_length or 1.0, row.rejection_rate or 0.0
            print(
                f"{spec:20} {batch:5} {row.tokens_per_step:8.3f} {accept:6.2f} {reject:6.1%} "
                f"{row.goodput_vs_plain:7.3f}"
            )
    calls = [call for session in workload.sessions for call in session]
    summary = {
        "program": "eval.simulate",
        "config": asdict(config),
        **provenance("cpu"),
        "sessions_sha256": workload.sha256,
        "num_sessions": len(workload.sessions),
        "num_calls": len(calls),
        "num_tokens": sum(len(call.output) for call in calls),
        "rows": [asdict(result.row) for result in results],
        "groups": [group for result in results for group in result.groups(config.cost)],
    }
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"written: {out}/summary.json")


if __name__ == "__main__":
    run(Config, main)
