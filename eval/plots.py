"""Figures of the report, each a PNG. A drafter keeps its colour from figure to figure."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

Row = dict[str, Any]

# Okabe and Ito's palette, told apart with every common colour blindness; grey is plain decoding.
GREY = "#8a8a8a"
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#56b4e9", "#e69f00"),
    *("#000000", "#cc79a7", "#7a5195"),
)
PARTS = {"draft": "#cc79a7", "verify": "#4d4d4d", "other": "#cfcfcf"}
WIDTH, HEIGHT = 5.8, 3.4  # inches: two figures stand side by side on a page of 1280 pixels


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name; "plain" is grey."""
    others = [name for name in dict.fromkeys(names) if name != "plain"]
    return {"plain": GREY} | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(others)}


def tau_by_drafter(rows: Sequence[Row]) -> bytes:
    figure, axes = axes_of("tau (tokens per target forward)", "")
    colour = colours(row["drafter"] for row in rows)
    for place, row in enumerate(reversed(rows)):
        low, high = row["tau_ci95"]
        error = [[row["tau"] - low], [high - row["tau"]]]
        axes.barh(place, row["tau"], xerr=error, color=colour[row["drafter"]], capsize=4)
        axes.annotate(
            f"{row['tau']:.2f}",
            (high, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(rows)), [row["drafter"] for row in reversed(rows)])
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    return png(figure)


def acceptance_by_position(rows: Sequence[Row], key: str, label: str) -> bytes:
    """Lines of `key` over draft positions, for the drafters that have rates."""
    figure, axes = axes_of("draft position", label)
    colour = colours(row["drafter"] for row in rows)
    longest = 1
    for row in rows:
        rates = [float("nan") if rate is None else rate for rate in row[key]]
        if rates:
            positions = range(1, len(rates) + 1)
            axes.plot(
                positions, rates, marker="o", color=colour[row["drafter"]], label=row["drafter"]
            )
            longest = max(longest, len(rates))
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.8, longest + 0.2)
    axes.set_xticks(range(1, longest + 1))
    legend(axes)
    return png(figure)


def time_split(rows: Sequence[Row]) -> bytes:
    figure, axes = axes_of("milliseconds per generated token", "")
    names = [row["drafter"] for row in reversed(rows)]
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        widths = [1e3 * row[f"{part}_seconds"] / row["num_tokens"] for row in reversed(rows)]
        axes.barh(names, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.grid(visible=False, axis="y")
    legend(axes)
    return png(figure)


def tau_by_category(rows: Sequence[Row]) -> bytes:
    figure, axes = axes_of("", "tau")
    colour = colours(row["drafter"] for row in rows)
    categories = list(dict.fromkeys(c for row in rows for c in row["by_category"]))
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [i + (number - (len(rows) - 1) / 2) * width for i in range(len(categories))]
        taus = [row["by_category"].get(category, 0.0) for category in categories]
        axes.bar(places, taus, width, color=colour[row["drafter"]], label=row["drafter"])
    axes.set_xticks(range(len(categories)), categories, rotation=20, ha="right")
    axes.grid(visible=False, axis="x")
    legend(axes)
    return png(figure)


def training_curve(lines: Sequence[Row], key: str, label: str) -> bytes:
    """`key` over the steps of all stages, one behind the other, from a training metrics file."""
    figure, axes = axes_of("training step, all stages", label)
    stages = [(stage, list(group)) for stage, group in groupby(lines, lambda line: line["stage"])]
    colour = colours(stage for stage, _ in stages)
    axes.xaxis.get_major_locator().set_params(integer=True)
    offset = 0
    for stage, group in stages:
        points = [(offset + line["step"], line[key]) for line in group if key in line]
        if points:
            marker = "o" if len(points) < 40 else None
            axes.plot(*zip(*points, strict=True), color=colour[stage], marker=marker, label=stage)
        offset += max(line["step"] for line in group)
        if stage != stages[-1][0]:
            axes.axvline(offset, color=GREY, linewidth=0.8, linestyle=":")
    legend(axes)
    return png(figure)


def round_by_context(rows: Sequence[Row]) -> bytes:
    figure, axes = axes_of("context length (tokens)", "round time / that at the shortest")
    colour = colours(row["shape"] for row in rows)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        points = [(r["context"], r["ratio_to_shortest"]) for r in rows if r["shape"] == shape]
        axes.plot(*zip(*points, strict=True), marker="o", color=colour[shape], label=shape)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [str(context) for context in contexts], rotation=20)
    axes.yaxis.set_major_formatter("{x:g}x")
    legend(axes)
    return png(figure)


def axes_of(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def legend(axes: Any) -> None:
    """Above the axes, in as many columns as fit beside one another."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = int(WIDTH * 14 / (8 + max(map(len, labels))))  # 14 letters an inch, a mark of 8
        axes.get_figure().legend(
            handles, labels, frameon=False, fontsize=9, ncols=columns, loc="outside upper left"
        )


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
