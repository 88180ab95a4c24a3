"""One HTML file that needs no other: tables and figures of acceptance, training and latency.

    python -m eval.report inputs=DIR,DIR2 out=FILE.html metrics=RUN/metrics.jsonl

An input is a folder with a `summary.json` of `eval.acceptance`, `eval.latency` or `eval.simulate`,
or that file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite.config import run
from eval import plots
from eval.page import Summary, figure, grid, number, source, table, text
from eval.replay_report import profile_section, simulate_section

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1240px; margin: 24px auto;
       padding: 0 20px; }
h1 { font-size: 24px; } h2 { font-size: 19px; margin-top: 36px; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 14px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #999; vertical-align: bottom; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px; }
figure { margin: 0; } figure img { max-width: 100%; } figcaption { font-size: 13px; color: #444; }
.warning { background: #fff3d6; border-left: 4px solid #e69f00; padding: 6px 12px; }
.source { font-size: 13px; color: #444; overflow-wrap: anywhere; }
code { font-size: 13px; }
"""


@dataclass(kw_only=True)
class Config:
    """python -m eval.report key=value ...: one HTML file from result files.

    `metrics` is a training run's metrics.jsonl."""

    inputs: list[str]
    out: str
    metrics: str | None = None


def write_report(
    summaries: Sequence[Summary], path: Path, metrics: Sequence[dict[str, Any]] = ()
) -> None:
    """`metrics` are the lines of a training run's metrics file; empty: no training section."""
    body = [section(summary) for summary in summaries]
    if metrics:
        body.append(training_section(metrics))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>dlite report</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>dlite report</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def section(summary: Summary) -> str:
    return SECTIONS[summary["program"]](summary)


# ---- acceptance ------------------------------------------------------------------------------


def acceptance_section(summary: Summary) -> str:
    rows, config = summary["rows"], summary["config"]
    drafting = [row for row in rows if row["acceptance_by_position"]]
    figures = [
        figure(plots.tau_by_drafter(rows), "tau, bonus token counted, with its 95 % interval."),
        figure(plots.time_split(rows), "Where the time goes. Other: prefill and bookkeeping."),
    ]
    if drafting:
        figures += [
            figure(
                plots.acceptance_by_position(
                    drafting, "acceptance_by_position", "unconditional acceptance"
                ),
                "Share of rounds that accepted draft tokens 1 to k. Their sum is tau - 1.",
            ),
            figure(
                plots.acceptance_by_position(
                    drafting, "conditional_acceptance_by_position", "conditional acceptance"
                ),
                "Share of k-th draft tokens accepted where all before them were.",
            ),
        ]
    if any(len(row["by_category"]) > 1 for row in rows):
        figures.append(figure(plots.tau_by_category(rows), "tau by category."))
    facts = (
        f"{rows[0]['num_requests']} requests, up to {config['max_new_tokens']} new tokens each, "
        f"temperature {config['temperature']:g}, batch size {config['batch_size']}, "
        f"target {config['target']} in {config['dtype']}."
    )
    if summary["skipped"]:
        facts += f" {len(summary['skipped'])} prompts were too long for the target and left out."
    return (
        f"<h2>Acceptance on {text(', '.join(config['suite']))}</h2>\n<p>{text(facts)}</p>\n"
        + acceptance_table(rows)
        + "".join(
            f'<p class="warning">{text(row["drafter"])}: {text(warning)}</p>'
            for row in rows
            for warning in row["warnings"]
        )
        + differences(rows)
        + grid(figures)
        + source(summary)
    )


def acceptance_table(rows: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "drafter": lambda r: r["drafter"],
        "tau": lambda r: f"{r['tau']:.2f}",
        "95 % interval": lambda r: "{:.2f} to {:.2f}".format(*r["tau_ci95"]),
        "mean over samples": lambda r: f"{r['tau_mean_over_samples']:.2f}",
        "accept length": lambda r: number(r["accept_length"], ".2f"),
        "rejection rate": lambda r: number(r["rejection_rate"], ".1%"),
        "identical to plain": lambda r: number(r["identical_share"], ".1%"),
        "tokens/s": lambda r: f"{r['tokens_per_second']:.1f}",
        "speed-up": lambda r: f"{r['speedup_vs_plain']:.2f}x",
        "draft s": lambda r: f"{r['draft_seconds']:.1f}",
        "verify s": lambda r: f"{r['verify_seconds']:.1f}",
        "other s": lambda r: f"{r['other_seconds']:.1f}",
    }
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def differences(rows: Sequence[dict[str, Any]]) -> str:
    found = [
        [row["drafter"], d["id"], str(d["position"]), f"{d['top2_margin']:.2g}"]
        for row in rows
        for d in row["differences"]
    ]
    if not found:
        return ""
    explanation = (
        "<p>Outputs that differ from plain decoding. A margin near 0 between the target's two best "
        "logits says that rounding decided.</p>"
    )
    return explanation + table(["drafter", "request", "first at token", "top-2 margin"], found)


# ---- training and latency --------------------------------------------------------------------


def training_section(lines: Sequence[dict[str, Any]]) -> str:
    last_tau = {line["stage"]: line["tau"] for line in lines if "tau" in line}
    figures = []
    for key, label, caption in (
        ("tau", "tau, own rollouts", "tau of the drafter's own rollouts on held-out samples."),
        ("loss", "loss", "Training loss. Stages have different losses."),
    ):
        if any(key in line for line in lines):
            figures.append(figure(plots.training_curve(lines, key, label), caption))
    by_stage = [[stage, f"{tau:.2f}"] for stage, tau in last_tau.items()]
    return "<h2>Training</h2>\n" + table(["stage", "tau at its end"], by_stage) + grid(figures)


def latency_section(summary: Summary) -> str:
    rows, heads = summary["rows"], summary["head_rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    found = {(row["shape"], row["context"]): row for row in rows}
    body = []
    for context in dict.fromkeys(row["context"] for row in rows):
        cells = [found[shape, context] for shape in shapes]
        body.append(
            [
                f"{context}",
                *(f"{1e3 * c['round_seconds']:.2f} ({c['ratio_to_shortest']:.2f}x)" for c in cells),
                *(f"{c['state_bytes'] / 2**20:.1f}" for c in cells),
            ]
        )
    header = ["context", *(f"{s} ms" for s in shapes), *(f"{s} state MiB" for s in shapes)]
    head_body = [
        [h["head"], f"{1e3 * h['round_seconds']:.1f}", f"{h['weight_bytes'] / 2**20:,.0f}"]
        for h in heads
    ]
    return (
        "<h2>Latency of a draft round</h2>\n"
        "<p>Random weights. A round fetches the taps, keeps up the draft's own state, and drafts."
        "</p>\n"
        + table(header, body)
        + grid([figure(plots.round_by_context(rows), "Time of a round by context length.")])
        + f"<p>The head alone: {text(summary['head_sizes'])}.</p>"
        + table(["head", "ms a round", "weights read, MiB"], head_body)
        + source(summary)
    )


def throughput_section(summary: Summary) -> str:
    header = ["suite", "drafter", "at once", "tokens/s", "speed-up", "tau", "rejected", "TTFT s"]
    header += ["TPOT ms", "P50 s", "P90 s", "P99 s", "drafting", "identical"]
    body = [
        [
            *(str(row[key]) for key in ("suite", "drafter", "concurrency")),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            f"{row['tau']:.2f}",
            number(row["rejection_rate"], ".1%"),
            f"{row['ttft_p50_seconds']:.2f}",
            f"{1e3 * row['tpot_p50_seconds']:.1f}",
            *(f"{row[f'e2e_p{p}_seconds']:.2f}" for p in (50, 90, 99)),
            f"{row['draft_share']:.1%}",
            f"{row['identical_share']:.1%}",
        ]
        for row in summary["rows"]
    ]
    return "<h2>Throughput</h2>\n" + table(header, body) + source(summary)


SECTIONS: dict[str, Callable[[Summary], str]] = {
    "eval.acceptance": acceptance_section,
    "eval.latency": latency_section,
    "eval.simulate": simulate_section,
    "eval.throughput": throughput_section,
    "eval.profile": profile_section,
}


def read_summary(name: str) -> Summary:
    path = Path(name)
    path = path / "summary.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no result file {path}; give a folder with a summary.json")
    summary = json.loads(path.read_text(encoding="utf-8"))
    if summary.get("program") not in SECTIONS:
        raise ValueError(f"{path} is no result of {' or '.join(SECTIONS)}; give one of theirs")
    return summary


def read_metrics(name: str) -> list[dict[str, Any]]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no metrics file {path}; give a training run's metrics.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main(config: Config) -> None:
    summaries = [read_summary(name) for name in config.inputs]
    metrics = read_metrics(config.metrics) if config.metrics else []
    write_report(summaries, Path(config.out), metrics)
    print(f"written: {config.out}")


if __name__ == "__main__":
    run(Config, main)
