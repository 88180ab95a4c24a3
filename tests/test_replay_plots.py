"""Figures of replays with many drafters."""

from __future__ import annotations

import warnings

from eval import replay_plots


def test_a_long_legend_leaves_no_room_for_the_axes() -> None:
    names = ["planner", "agspec", *(f"agentspec:variant-{i}" for i in range(6))]
    groups = [
        {
            "drafter": name,
            "variant": "",
            "by": "turn",
            "group": "1-3",
            "tokens_per_step": 2.0,
            "tokens_per_step_ci95": (1.9, 2.1),
        }
        for name in names
    ]
    rows = [{"drafter": n, "variant": "", "batch": 4, "goodput_vs_plain": 2.0} for n in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "constrained_layout not applied because axes collapsed"
        replay_plots.by_group(groups, "turn")
        replay_plots.budget_use(rows, [{"3": 1}] * len(rows), 256)
