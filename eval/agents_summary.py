"""The figures of replays worth keeping: one small JSON file, and its tables in Markdown.

    python -m eval.agents_summary inputs=runs/agents/replay,runs/agents/ablations out=results/agents

writes `summary.json` and `tables.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite.config import run
from dlite.files import writable
from eval.replay_report import name_of
from eval.tally import natural, read_summaries

Row = dict[str, Any]

GROUPINGS = {
    "all": "One request at a time",
    "scaffold": "By scaffold",
    "turn": "By turn",
    "edits": "Calls that edit, and others",
}
KEPT = (
    *("by", "group", "tokens_per_step", "tokens_per_step_ci95", "tokens_per_step_macro"),
    *("accept_length", "rejection_rate", "num_rounds", "num_tokens"),
)
GRIDS = ("static", "threshold")  # of these only the goodput is of use
SHARED = ("sessions_sha256", "num_sessions", "num_calls", "num_tokens")


@dataclass(kw_only=True)
class Config:
    """python -m eval.agents_summary inputs=DIR,... out=DIR: what is kept of replays.

    `inputs` are folders of eval.simulate, all of the same sessions; the later one counts where two
    hold the same figure."""

    inputs: list[str]
    out: str


def gather(summaries: Sequence[Row]) -> Row:
    """Raises ValueError for replays of different sessions."""
    first = summaries[0]
    for summary in summaries:
        if summary["sessions_sha256"] != first["sessions_sha256"]:
            raise ValueError("inputs are of different sessions; give replays of the same ones")
    drafters: dict[str, Row] = {}
    for summary in summaries:
        for row, seeds in zip(summary["rows"], summary["goodput_by_seed"], strict=True):
            found = drafters.setdefault(name_of(row), {"goodput_by_seed": {}, "groups": []})
            found["goodput_by_seed"][row["batch"]] = seeds
        ones = [g for g in summary["groups"] if g["batch"] == 1 and g["by"] in GROUPINGS]
        for name in dict.fromkeys(name_of(g) for g in ones if g["drafter"] not in GRIDS):
            drafters[name]["groups"] = [
                {key: group[key] for key in KEPT} for group in ones if name_of(group) == name
            ]
    commits = sorted({summary["commit"] for summary in summaries})
    kept = {key: first[key] for key in SHARED} | {"commits": commits, "drafters": drafters}
    return json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 4))


def tables(kept: Row) -> str:
    drafters = kept["drafters"]
    groups = [(name, group) for name, one in drafters.items() for group in one["groups"]]
    parts = [
        f"# Replay of {kept['num_sessions']} sessions",
        f"{kept['num_calls']} calls, {kept['num_tokens']:,} generated tokens. Tokens per step with "
        "95 % intervals over sessions; goodput against plain decoding, averaged over seeds.",
    ]
    for by, title in GROUPINGS.items():
        chosen = [(name, group) for name, group in groups if group["by"] == by]
        names = sorted({group["group"] for _, group in chosen}, key=natural)
        found = {(name, group["group"]): group for name, group in chosen}
        header = ["tokens/step", "mean over sessions", "accept length", "rejected"]
        body = [
            [name, *(_cell(found.get((name, n))) for n in names)]
            for name in dict.fromkeys(name for name, _ in chosen)
        ]
        if by == "all":
            body = [[*row, *_more(found[row[0], "all"])] for row in body]
        parts += [f"## {title}", _table(["drafter", *(header if by == "all" else names)], body)]
    batches = sorted({int(b) for one in drafters.values() for b in one["goodput_by_seed"]})
    body = [
        [name, *(_goodput(one["goodput_by_seed"].get(str(b))) for b in batches)]
        for name, one in drafters.items()
    ]
    parts += ["## Goodput by batch size", _table(["drafter", *map(str, batches)], body)]
    return "\n\n".join(parts) + "\n"


def _cell(group: Row | None) -> str:
    if group is None:
        return ""
    low, high = group["tokens_per_step_ci95"]
    return f"{group['tokens_per_step']:.2f} ({low:.2f} to {high:.2f})"


def _more(group: Row) -> list[str]:
    rejected, length = group["rejection_rate"], group["accept_length"]
    return [
        f"{group['tokens_per_step_macro']:.2f}",
        "" if length is None else f"{length:.2f}",
        "" if rejected is None else f"{rejected:.1%}",
    ]


def _goodput(seeds: Sequence[float] | None) -> str:
    if not seeds:
        return ""
    return f"{sum(seeds) / len(seeds):.2f}" + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(config: Config) -> None:
    kept, out = gather(read_summaries(config.inputs)), writable(Path(config.out), "out")
    (out / "summary.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    (out / "tables.md").write_text(tables(kept))
    print(f"written: {out}/summary.json, tables.md")


if __name__ == "__main__":
    run(Config, main)
