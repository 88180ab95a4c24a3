"""Figures of replayed sessions, each a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eval.plots import GREY, Row, axes_of, colours, legend, png


def _name(row: Row) -> str:
    return f"{row['drafter']}:{row['variant']}" if row["variant"] else row["drafter"]


def by_group(groups: Sequence[Row], by: str) -> bytes:
    """Tokens per step with their intervals, drafters side by side within each group."""
    chosen = [group for group in groups if group["by"] == by]
    names = list(dict.fromkeys(map(_name, chosen)))
    labels = list(dict.fromkeys(group["group"] for group in chosen))
    found = {(_name(group), group["group"]): group for group in chosen}
    figure, axes = axes_of("", "tokens per step")
    colour = colours(names)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        cells = [found[name, label] for label in labels if (name, label) in found]
        places = [
            place + (number - (len(names) - 1) / 2) * width
            for place, label in enumerate(labels)
            if (name, label) in found
        ]
        values = np.array([cell["tokens_per_step"] for cell in cells])
        ends = np.array([cell["tokens_per_step_ci95"] for cell in cells]).T
        error = np.maximum([values - ends[0], ends[1] - values], 0)
        axes.bar(places, values, width, yerr=error, color=colour[name], label=name, capsize=1.5)
    axes.set_xticks(range(len(labels)), labels, rotation=15, ha="right")
    axes.grid(visible=False, axis="x")
    legend(axes)
    return png(figure)


def step_shares(rows: Sequence[Row], groups: Sequence[Row]) -> bytes:
    """Accepted and rejected tokens a step of each drafter."""
    whole = [group for group in groups if group["by"] == "all"]
    figure, axes = axes_of("drafted tokens a step", "")
    names = [_name(group) for group in reversed(whole)]
    rounds = np.array([group["num_rounds"] for group in reversed(whole)])
    accepted = np.array([group["num_accepted"] for group in reversed(whole)]) / rounds
    drafted = np.array([group["num_drafted"] for group in reversed(whole)]) / rounds
    axes.barh(names, accepted, color="#009e73", label="accepted")
    axes.barh(names, drafted - accepted, left=accepted, color="#cc79a7", label="rejected")
    axes.grid(visible=False, axis="y")
    legend(axes)
    return png(figure)


def goodput(rows: Sequence[Row]) -> bytes:
    figure, axes = axes_of("batch size", "goodput / plain decoding")
    names = list(dict.fromkeys(map(_name, rows)))
    colour = colours(names)
    for name in names:
        points = sorted((r["batch"], r["goodput_vs_plain"]) for r in rows if _name(r) == name)
        axes.plot(*zip(*points, strict=True), marker="o", color=colour[name], label=name)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    batches = sorted({row["batch"] for row in rows})
    axes.set_xticks(batches, list(map(str, batches)))
    legend(axes)
    return png(figure)


def budget_use(rows: Sequence[Row], counts: Sequence[Mapping[str, int]], ridge: int) -> bytes:
    """Drafted tokens a batch against the head-room of its step."""
    figure, axes = axes_of("batch size", "drafted tokens a step")
    names = list(dict.fromkeys(map(_name, rows)))
    colour = colours(names)
    batches = sorted({row["batch"] for row in rows})
    for name in names:
        points = []
        for row, steps in zip(rows, counts, strict=True):
            if _name(row) == name:
                drafted = np.array([int(tokens) for tokens in steps])
                times = np.array(list(steps.values()))
                share = times.cumsum() / times.sum()
                low, high = drafted[np.searchsorted(share, [0.05, 0.95])]
                points.append((row["batch"], (drafted * times).sum() / times.sum(), low, high))
        batch, mean, low, high = zip(*sorted(points), strict=True)
        axes.plot(batch, mean, marker="o", color=colour[name], label=name)
        axes.fill_between(batch, low, high, color=colour[name], alpha=0.12, linewidth=0)
    axes.plot(batches, [max(0, ridge - b) for b in batches], color=GREY, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, list(map(str, batches)))
    legend(axes)
    return png(figure)


def repeated_spans(lengths: Sequence[int], shares: Mapping[str, Sequence[float]]) -> bytes:
    figure, axes = axes_of("span of at least ... tokens", "share of generated tokens")
    below = np.zeros(len(lengths))
    colour = colours(shares)
    for name, values in shares.items():
        label = name.lower().replace("_", " ")
        axes.bar(range(len(lengths)), values, bottom=below, color=colour[name], label=label)
        below += np.array(values)
    axes.set_xticks(range(len(lengths)), list(map(str, lengths)))
    axes.grid(visible=False, axis="x")
    legend(axes)
    return png(figure)


def acceptance(cells: Sequence[Mapping[str, float]], least: int = 30) -> bytes:
    """Lines over match length, one for each share of agreeing occurrences, of the cells with at
    least `least` drafts."""
    figure, axes = axes_of("match length", "first token accepted")
    shares = sorted({cell["agreement"] for cell in cells})
    colour = colours(map(str, shares))
    for share in shares:
        points = [
            (cell["match"], cell["first"])
            for cell in cells
            if cell["agreement"] == share and cell["count"] >= least
        ]
        if points:
            label = f"c/n >= {share:g}" if share < 1 else "c/n = 1"
            axes.plot(*zip(*points, strict=True), marker="o", color=colour[str(share)], label=label)
    matches = sorted({cell["match"] for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(matches, list(map(str, matches)))
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    legend(axes)
    return png(figure)
