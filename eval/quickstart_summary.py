"""The quickstart's outcome in one place: `summary.json`, `report.html` and the table at its end.

    python -m eval.quickstart_summary run=runs/quickstart results=results/quickstart seconds=900

reads the run's `metrics.jsonl` and `config.yaml`, and the results of `eval.acceptance` in
`heldout/` and, if it is there, `spec_bench/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dlite.config import run as run_program
from eval.provenance import provenance
from eval.report import Summary, read_metrics, read_summary, write_report

FIGURES = ("tau", "identical_share", "tokens_per_second", "speedup_vs_plain")


@dataclass(kw_only=True)
class Config:
    """python -m eval.quickstart_summary key=value ...: merges a run and its evaluations.

    `seconds` is the wall-clock of the whole quickstart."""

    run: str
    results: str
    seconds: float


def figures(summary: Summary) -> dict[str, dict[str, float]]:
    """Each figure by drafter, plain decoding included."""
    rows = summary["rows"]
    return {name: {row["drafter"]: row[name] for row in rows} for name in FIGURES}


def tau_by_stage(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """tau of the last evaluation of each stage, on the samples held out of training."""
    return {line["stage"]: line["tau"] for line in metrics if "tau" in line}


def quickstart_summary(config: Config) -> tuple[dict[str, Any], list[Summary]]:
    """The merged figures, and the summaries that they are from."""
    results = Path(config.results)
    heldout = read_summary(str(results / "heldout"))
    device = heldout["config"]["device"]
    merged = {
        "target": heldout["config"]["target"],
        **figures(heldout),
        "tau_by_stage": tau_by_stage(read_metrics(f"{config.run}/metrics.jsonl")),
        "seconds": config.seconds,
        "num_prompts": heldout["num_items"],
        "prompts_sha256": heldout["prompts_sha256"],
        "config": {
            "train": OmegaConf.to_container(OmegaConf.load(Path(config.run) / "config.yaml")),
            "heldout": heldout["config"],
        },
        **provenance(device),
    }
    if not (results / "spec_bench").exists():
        return merged, [heldout]
    spec_bench = read_summary(str(results / "spec_bench"))
    merged["spec_bench"] = {
        **figures(spec_bench),
        "num_prompts": spec_bench["num_items"],
        "prompts_sha256": spec_bench["prompts_sha256"],
        "config": spec_bench["config"],
    }
    return merged, [heldout, spec_bench]


def table(merged: dict[str, Any]) -> str:
    """In Markdown, as the README shows it."""
    lines = [
        "| drafter | tau | tokens/s | speed-up | identical to plain |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {tau:.2f} | {merged['tokens_per_second'][name]:.1f} "
        f"| {merged['speedup_vs_plain'][name]:.2f}x | {merged['identical_share'][name]:.0%} |"
        for name, tau in merged["tau"].items()
    ]
    return "\n".join(lines)


def main(config: Config) -> None:
    merged, summaries = quickstart_summary(config)
    results = Path(config.results)
    (results / "summary.json").write_text(json.dumps(merged, indent=2) + "\n")
    write_report(summaries, results / "report.html", read_metrics(f"{config.run}/metrics.jsonl"))
    print(f"{merged['num_prompts']} prompts that were not trained on\n{table(merged)}")
    if "spec_bench" in merged:
        spec_bench = merged["spec_bench"]
        print(f"\n{spec_bench['num_prompts']} prompts of Spec-Bench\n{table(spec_bench)}")
    print(f"\n{config.seconds:.0f} s in all; written: {results}/summary.json, report.html")


if __name__ == "__main__":
    run_program(Config, main)
