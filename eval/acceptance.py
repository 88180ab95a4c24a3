"""How many drafted tokens the target accepts, and what that gains, against plain decoding.

    python -m eval.acceptance draft=DIR target=NAME suite=FILE.jsonl drafter=dlite,ngram out=DIR

writes `summary.json` (a row per drafter, plain decoding included), `rounds.jsonl` (what every
request did) and `report.html`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlite import checkpoint
from dlite.config import run
from dlite.decode import Times, top2_margins
from dlite.drafters import registry
from dlite.drafters.base import Drafter
from dlite.drafters.history import HistoryDrafter
from dlite.drafters.neural import NeuralDrafter
from dlite.files import writable
from dlite.target import TargetModel
from dlite.types import Round, tokens_per_step
from eval import metrics
from eval.provenance import provenance
from eval.report import write_report
from eval.runs import PLAIN, Options, Record, Runs, collect
from eval.suites import Item, load_suites, prompts_sha256


@dataclass(kw_only=True)
class Config(Options):
    """python -m eval.acceptance key=value ...: tau and speed of drafters on prompts.

    `suite` takes files and benchmark names, `limit` items of each (0: all). `draft` is the draft
    model's folder or hub id, `options.NAME.KEY=VALUE` an option of another drafter. Plain decoding
    is always measured."""

    target: str
    out: str
    suite: list[str]
    drafter: list[str] = field(default_factory=lambda: ["ngram"])
    draft: str | None = None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    limit: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafter = [name for name in self.drafter if name != PLAIN]
        for name in (*self.drafter, *self.options):
            registry.check_name(name)
        if "dlite" in self.drafter and self.draft is None:
            raise ValueError("drafter dlite needs a draft model; add draft=DIR")

    def drafter_options(self, name: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if name == "hybrid":
            options |= {"batch_size": self.batch_size, "num_draft": self.num_draft}
        if name in ("dlite", "hybrid") and self.draft is not None:
            options["draft"] = self.draft
        return options | self.options.get(name, {})


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output left plain decoding's, and how far plain's best logit led there."""

    id: str
    position: int
    top2_margin: float


@dataclass(slots=True)
class Row:
    """A drafter's figures; `eval.metrics` defines them. `speedup_vs_plain` and the times hold for
    this run alone. `identical_share` is None when sampling, where outputs differ by right."""

    drafter: str
    tau: float
    tau_ci95: tuple[float, float]
    tau_mean_over_samples: float
    accept_length: float | None
    acceptance_by_position: list[float]
    conditional_acceptance_by_position: list[float | None]
    rejection_rate: float | None
    tokens_per_second: float
    speedup_vs_plain: float
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    total_seconds: float
    num_requests: int
    num_rounds: int
    num_tokens: int
    by_category: dict[str, float]
    identical_share: float | None = None
    differences: list[Difference] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def evaluate(
    target: TargetModel,
    drafters: Mapping[str, Drafter | None],
    items: Sequence[Item],
    options: Options,
) -> list[Row]:
    """Rows of plain decoding and of each drafter, measured in one run over the same prompts."""
    return make_rows(target, drafters, collect(target, drafters, items, options), options)


def make_rows(
    target: TargetModel, drafters: Mapping[str, Drafter | None], runs: Runs, options: Options
) -> list[Row]:
    plain = runs.records[PLAIN]
    plain_speed = _num_tokens(plain) / runs.times[PLAIN].total_seconds
    rows = []
    for name, records in runs.records.items():
        row = _row(name, records, runs.times[name], plain_speed, options.seed)
        if options.temperature == 0:
            pairs = [(a.tokens, b.tokens) for a, b in zip(records, plain, strict=True)]
            row.identical_share = metrics.identical_share(pairs)
            row.differences = _differences(target, records, plain)
        drafter = drafters.get(name)
        if isinstance(drafter, NeuralDrafter | HistoryDrafter):
            fault = metrics.head_fault(_rounds(records))
            row.warnings += [fault] if fault else []
        rows.append(row)
    return rows


def _row(name: str, records: list[Record], times: Times, plain_speed: float, seed: int) -> Row:
    rounds = _rounds(records)
    speed = _num_tokens(records) / times.total_seconds
    return Row(
        drafter=name,
        tau=tokens_per_step(rounds),
        tau_ci95=metrics.tau_ci95(rounds, seed=seed),
        tau_mean_over_samples=metrics.tau_mean_over_samples(rounds),
        accept_length=metrics.accept_length(rounds),
        acceptance_by_position=metrics.acceptance_by_position(rounds),
        conditional_acceptance_by_position=metrics.conditional_acceptance_by_position(rounds),
        rejection_rate=metrics.rejection_rate(rounds),
        tokens_per_second=speed,
        speedup_vs_plain=speed / plain_speed,
        draft_seconds=times.draft_seconds,
        verify_seconds=times.verify_seconds,
        other_seconds=times.other_seconds,
        total_seconds=times.total_seconds,
        num_requests=len(records),
        num_rounds=len(rounds),
        num_tokens=_num_tokens(records),
        by_category=_by_category(records),
    )


def _rounds(records: list[Record]) -> list[Round]:
    return [r for record in records for r in record.rounds]


def _num_tokens(records: list[Record]) -> int:
    return sum(len(record.tokens) for record in records)


def _by_category(records: list[Record]) -> dict[str, float]:
    """tau of each category that has a round."""
    rounds: dict[str, list[Round]] = {}
    for record in records:
        rounds.setdefault(record.category, []).extend(record.rounds)
    return {category: tokens_per_step(found) for category, found in rounds.items() if found}


def _differences(
    target: TargetModel, records: list[Record], plain: list[Record]
) -> list[Difference]:
    found = []
    for ours, theirs in zip(records, plain, strict=True):
        position = metrics.first_difference(ours.tokens, theirs.tokens)
        if position is not None:
            longer = max(ours.tokens, theirs.tokens, key=len)[: position + 1]
            margin = top2_margins(target, ours.request.prompt, longer)[position]
            found.append(Difference(ours.request.id, position, margin))
    return found


def template_warning(draft: str, template_kwargs: dict[str, Any]) -> str | None:
    """Set when a draft model was trained under other chat-template arguments than are used now,
    such as the other thinking mode: that alone can halve acceptance."""
    trained = checkpoint.read(draft).template_kwargs
    if trained == template_kwargs:
        return None
    return (
        f"the draft model was trained with template_kwargs {trained}, this run uses "
        f"{template_kwargs}: acceptance may suffer; pass the same ones"
    )


def build(config: Config, target: TargetModel) -> tuple[dict[str, Drafter], dict[str, list[str]]]:
    """The drafters that a config names, and what was warned about while building them."""
    drafters, warned = {}, {}
    for name in config.drafter:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            drafters[name] = registry.build(name, config.drafter_options(name), target=target)
        warned[name] = [str(w.message) for w in caught]
        if drafters[name].tap_ids and config.draft is not None:
            warning = template_warning(config.draft, config.template_kwargs)
            warned[name] += [warning] if warning else []
    return drafters, warned


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    items = load_suites(config.suite, config.limit)
    target = TargetModel.load(config.target, dtype=config.dtype, device=config.device)
    drafters, warned = build(config, target)
    runs = collect(target, drafters, items, config)
    rows = make_rows(target, drafters, runs, config)
    for row in rows:
        row.warnings = warned.get(row.drafter, []) + row.warnings
    summary = {
        "program": "eval.acceptance",
        "config": asdict(config),
        **provenance(config.device),
        "target": {"name": target.name, **target.fingerprint()},
        "prompts_sha256": prompts_sha256(items),
        "template_kwargs": config.template_kwargs,
        "num_items": len(items),
        "skipped": [{"id": name, "prompt_tokens": n} for name, n in runs.skipped],
        "rows": [asdict(row) for row in rows],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    with (out / "rounds.jsonl").open("w", encoding="utf-8") as file:
        for records in runs.records.values():
            file.writelines(json.dumps(record.to_json()) + "\n" for record in records)
    write_report([summary], out / "report.html")
    print_rows(rows, len(runs.skipped), out)


def print_rows(rows: list[Row], num_skipped: int, out: Path) -> None:
    print(f"{'drafter':10} {'tau':>6} {'95% CI':>13} {'tokens/s':>9} {'speed-up':>9} identical")
    for row in rows:
        low, high = row.tau_ci95
        same = "-" if row.identical_share is None else f"{row.identical_share:.1%}"
        print(
            f"{row.drafter:10} {row.tau:6.2f} {low:6.2f}-{high:<6.2f} {row.tokens_per_second:9.1f} "
            f"{row.speedup_vs_plain:8.2f}x {same:>9}"
        )
        for warning in row.warnings:
            print(f"warning: {row.drafter}: {warning}", file=sys.stderr)
    if num_skipped:
        print(f"{num_skipped} prompts were too long for the target and left out")
    print(f"written: {out}/summary.json, rounds.jsonl, report.html")


if __name__ == "__main__":
    run(Config, main)
