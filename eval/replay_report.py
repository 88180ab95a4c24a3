"""The report's section on replayed sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import replay_plots as plots
from eval.page import Summary, figure, grid, number, source, table, text

Row = dict[str, Any]


def name_of(row: Row) -> str:
    return f"{row['drafter']}:{row['variant']}" if row["variant"] else row["drafter"]


def simulate_section(summary: Summary) -> str:
    rows, groups = summary["rows"], summary["groups"]
    lowest = min(row["batch"] for row in rows)
    alone = [group for group in groups if group["batch"] == lowest]
    facts = (
        f"{summary['num_sessions']} sessions, {summary['num_calls']} model calls, "
        f"{summary['num_tokens']:,} generated tokens, replayed as a greedy target would write them "
        f"again; at most {summary['config']['max_draft']} tokens a draft. Goodput: tokens per "
        "modelled time, over plain decoding's at the same batch size."
    )
    return (
        f"<h2>Replay of {text(', '.join(summary['config']['sessions']))}</h2>\n<p>{facts}</p>\n"
        + _rows_table(rows, alone)
        + _goodput_table(rows)
        + f"<h3>By scaffold, turn and kind of call, {lowest} at a time</h3>\n"
        + "".join(_group_table(alone, by) for by in ("scaffold", "turn", "edits", "agent"))
        + "<h3>By source of the draft</h3>\n"
        + _source_table(alone)
        + grid(_figures(summary, alone))
        + source(summary)
    )


def _rows_table(rows: Sequence[Row], alone: Sequence[Row]) -> str:
    whole = {name_of(g): g for g in alone if g["by"] == "all"}
    lowest = min(row["batch"] for row in rows)
    body = [
        [
            name_of(row),
            f"{row['tokens_per_step']:.2f}",
            "{:.2f} to {:.2f}".format(*whole[name_of(row)]["tokens_per_step_ci95"]),
            f"{whole[name_of(row)]['tokens_per_step_macro']:.2f}",
            number(row["accept_length"], ".2f"),
            number(row["rejection_rate"], ".1%"),
            f"{row['draft_microseconds_per_step']:.0f}",
        ]
        for row in rows
        if row["batch"] == lowest
    ]
    header = ["drafter", "tokens/step", "95 % interval", "mean over sessions", "accept length"]
    return table([*header, "rejection rate", "drafting, us a step"], body)


def _goodput_table(rows: Sequence[Row]) -> str:
    batches = sorted({row["batch"] for row in rows})
    found = {(name_of(row), row["batch"]): row for row in rows}
    body = [
        [
            name,
            *(
                f"{found[name, b]['goodput_vs_plain']:.2f}" if (name, b) in found else "-"
                for b in batches
            ),
        ]
        for name in dict.fromkeys(map(name_of, rows))
    ]
    return table(["goodput / plain, batch size", *map(str, batches)], body)


def _group_table(groups: Sequence[Row], by: str) -> str:
    chosen = [group for group in groups if group["by"] == by]
    found = {(name_of(group), group["group"]): group for group in chosen}
    names = list(dict.fromkeys(map(name_of, chosen)))
    body = [
        [
            group,
            *(
                "{:.2f} ({:.2f} to {:.2f})".format(
                    found[name, group]["tokens_per_step"],
                    *found[name, group]["tokens_per_step_ci95"],
                )
                if (name, group) in found
                else "-"
                for name in names
            ),
        ]
        for group in dict.fromkeys(group["group"] for group in chosen)
    ]
    return table([f"tokens/step by {by}", *names], body)


def _source_table(groups: Sequence[Row]) -> str:
    body = [
        [
            name_of(group),
            group["group"] or "-",
            f"{group['num_rounds']:,}",
            f"{group['num_drafted'] / group['num_rounds']:.2f}",
            f"{group['num_accepted'] / group['num_rounds']:.2f}",
            number(group["rejection_rate"], ".1%"),
        ]
        for group in groups
        if group["by"] == "source"
    ]
    return table(
        ["drafter", "source", "rounds", "drafted a round", "accepted a round", "rejected"], body
    )


MOST_NAMES = 8  # in a figure


def _figures(summary: Summary, alone: Sequence[Row]) -> list[str]:
    """Of the default variants alone where there are too many drafters for one figure."""
    names = list(dict.fromkeys(map(name_of, summary["rows"])))
    if len(names) > MOST_NAMES:
        names = [name for name in names if ":" not in name][:MOST_NAMES] or names[:MOST_NAMES]
    kept = [i for i, row in enumerate(summary["rows"]) if name_of(row) in names]
    rows = [summary["rows"][i] for i in kept]
    step_tokens = [summary["step_tokens"][i] for i in kept]
    alone = [group for group in alone if name_of(group) in names]
    return [
        figure(plots.by_group(alone, "turn"), "Tokens per step by the call's turn in its session."),
        figure(plots.by_group(alone, "scaffold"), "Tokens per step by scaffold."),
        figure(plots.step_shares(rows, alone), "Tokens a step: accepted, and rejected above them."),
        figure(plots.goodput(rows), "Goodput relative to plain decoding, by batch size."),
        figure(
            plots.budget_use(rows, step_tokens, summary["config"]["ridge"]),
            "Drafted tokens a step, mean and 5th to 95th percentile; M(b) = ridge - b is dashed.",
        ),
    ]


def profile_section(summary: Summary) -> str:
    caps, spans = summary["caps"], summary["spans"]
    agents = sorted({agent for found in caps.values() for agent in found["agents"]})
    caps_body = [
        [
            lam,
            str(found["shared"]),
            *(str(found["agents"].get(agent, "-")) for agent in agents),
        ]
        for lam, found in caps.items()
    ]
    facts = (
        f"{summary['num_sessions']} sessions, {summary['num_drafts']:,} drafts of a walk; static "
        f"corpus of {summary['corpus_tokens']:,} tokens."
    )
    return (
        f"<h2>Profile of {text(', '.join(summary['config']['sessions']))}</h2>\n<p>{facts}</p>\n"
        + table(["lambda", "cap, all agents", *agents], caps_body)
        + grid(
            [
                figure(
                    plots.repeated_spans(spans["lengths"], spans["shares"]),
                    "Share of generated tokens in repeated spans of at least so many tokens, by "
                    "where the span is from.",
                ),
                figure(
                    plots.acceptance(summary["acceptance"]),
                    "Share of drafts whose first token stands, by match length and by the share "
                    "c/n of occurrences that agree.",
                ),
            ]
        )
        + source(summary)
    )
