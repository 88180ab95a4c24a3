"""Claims about replayed sessions, checked against the figures that `eval.simulate` wrote.

    python -m eval.bars inputs=DIR,DIR2

prints each claim, what was measured, what is asked, and whether it is met. The bounds were set
before this code existed, on the same sessions, with other programs: some ten percent of each gain
is left for differences. Figures that no input holds are reported as missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlite.config import run
from eval.tally import read_summaries

BATCHES = (1, 4, 16, 64)


@dataclass(kw_only=True)
class Config:
    """python -m eval.bars inputs=DIR,...: claims about replays, checked.

    `inputs` are folders with a `summary.json` of eval.simulate; the later one counts where two
    hold the same figure."""

    inputs: list[str]


class Line(NamedTuple):
    claim: str
    figure: float | None  # None: an input is missing
    bar: str
    met: bool | None


class Figures:
    """Rows and groups by drafter and batch. A lookup of what isn't there raises KeyError."""

    def __init__(self, summaries: Sequence[dict[str, Any]]) -> None:
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        self._groups: dict[tuple[str, int, str, str], dict[str, Any]] = {}
        self._calibration: dict[tuple[str, int], Any] = {}
        for summary in summaries:
            for row, calibration in zip(summary["rows"], summary["calibration"], strict=True):
                self._rows[_spec(row), row["batch"]] = row
                self._calibration[_spec(row), row["batch"]] = calibration
            for group in summary["groups"]:
                key = _spec(group), group["batch"], group["by"], group["group"]
                self._groups[key] = group

    def tau(self, spec: str, by: str = "all", group: str = "all") -> float:
        return self._groups[spec, 1, by, group]["tokens_per_step"]

    def rejection(self, spec: str) -> float:
        return self._rows[spec, 1]["rejection_rate"]

    def goodput(self, spec: str, batch: int) -> float:
        return self._rows[spec, batch]["goodput_vs_plain"]

    def names(self, by: str) -> list[str]:
        return sorted({name for _, _, found, name in self._groups if found == by})

    def specs(self, prefix: str) -> list[str]:
        return sorted({spec for spec, _ in self._rows if spec.startswith(prefix)})

    def same_rounds(self, spec: str, other: str) -> bool:
        left, right = (self._groups[s, 1, "stream", "one"] for s in (spec, other))
        keys = ("num_rounds", "num_drafted", "num_accepted")
        return all(left[key] == right[key] for key in keys)

    def calibration(self, spec: str) -> list[dict[str, float]]:
        return self._calibration[spec, 1]


def _spec(row: dict[str, Any]) -> str:
    return f"{row['drafter']}:{row['variant']}" if row["variant"] else row["drafter"]


def at_least(claim: str, bar: float, figure: Callable[[], float]) -> Line:
    value = _looked_up(figure)
    return Line(claim, value, f">= {bar:g}", None if value is None else value >= bar)


def at_most(claim: str, bar: float, figure: Callable[[], float]) -> Line:
    value = _looked_up(figure)
    return Line(claim, value, f"<= {bar:g}", None if value is None else value <= bar)


def _looked_up(figure: Callable[[], float]) -> float | None:
    try:
        return figure()
    except KeyError:
        return None


# ---- one at a time -----------------------------------------------------------------------------

# tokens/step and rejection rate of programs that share no code with this one
KNOWN = {
    "ngram:pld10": (1.84, 0.74),
    "sam": (2.16, 0.60),
    "sam:session": (2.17, 0.60),
    "agspec": (2.22, 0.57),
    "suffix": (2.15, 0.60),
    "agentspec:strict": (2.01, 0.57),
}


def agreement(f: Figures) -> Iterator[Line]:
    for spec, (tau, rejection) in KNOWN.items():
        yield at_most(
            f"{spec}: tokens/step off {tau}", 0.03, lambda s=spec, t=tau: abs(f.tau(s) / t - 1)
        )
        yield at_most(
            f"{spec}: rejection off {rejection}",
            0.02,
            lambda s=spec, r=rejection: round(abs(f.rejection(s) - r), 4),
        )
    yield at_least(
        "sessions of one stream: session drafts as call drafts",
        1,
        lambda: float(f.same_rounds("sam", "sam:session")),
    )


def corpora(f: Figures) -> Iterator[Line]:
    session = "agspec:+session"
    yield at_least("session / own output", 1.55, lambda: f.tau(session) / f.tau("sam:own"))
    edits = ("edits", "moatless-0.4, edits")
    yield at_least(
        "forms of files, moatless-0.4 edit calls",
        1.08,
        lambda: f.tau("agspec:+forms", *edits) / f.tau(session, *edits),
    )
    yield at_least(
        "all forms on, the scaffold that loses most",
        0.997,
        lambda: _worst(f, "agspec:+allforms", "agspec:+session"),
    )
    yield at_least(
        "static corpus added", 1.08, lambda: f.tau("agspec:+global0") / f.tau("agspec:+forms")
    )


def _worst(f: Figures, spec: str, other: str) -> float:
    return min(
        f.tau(spec, "scaffold", name) / f.tau(other, "scaffold", name)
        for name in f.names("scaffold")
    )


def survival(f: Figures) -> Iterator[Line]:
    longest = "planner:S.003"
    yield at_least("survival / call", 1.25, lambda: f.tau(longest) / f.tau("sam"))
    yield at_least("survival / PLD", 1.45, lambda: f.tau(longest) / f.tau("ngram:pld10"))
    yield at_least(
        "survival / AgSpec's corpora", 1.17, lambda: f.tau(longest) / f.tau("agspec:+global")
    )
    yield at_least("survival, tokens/step", 2.70, lambda: f.tau(longest))
    yield at_least(
        "survival / AgSpec at AgSpec's rejection",
        1.04,
        lambda: _tau_at(f, f.rejection("agspec")) / f.tau("agspec"),
    )
    yield at_least("survival at rejection .30, tokens/step", 1.65, lambda: _tau_at(f, 0.30))
    yield at_most("calibration, worst bin", 0.07, lambda: max(_errors(f, longest)))
    yield at_most(
        "calibration, mean over bins", 0.02, lambda: sum(e := _errors(f, longest)) / len(e)
    )
    yield at_least(
        "blocks as a class, the scaffold that loses most",
        0.995,
        lambda: _worst(f, longest, "planner:S.003-no-blocks"),
    )


def _tau_at(f: Figures, rejection: float) -> float:
    """Tokens/step where the survival policy's thresholds would reach this rejection rate."""
    points = sorted((f.rejection(s), f.tau(s)) for s in f.specs("planner:S.") if "no" not in s)
    below = [point for point in points if point[0] <= rejection]
    above = [point for point in points if point[0] >= rejection]
    if not below or not above:
        raise KeyError("no threshold on both sides")
    (low, tau_low), (high, tau_high) = below[-1], above[0]
    share = (rejection - low) / (high - low) if high > low else 0.0
    return tau_low + share * (tau_high - tau_low)


def _errors(f: Figures, spec: str) -> list[float]:
    """|predicted - actual| in bins of at least 3,000 predictions."""
    bins = [b for b in f.calibration(spec) if b["count"] >= 3000]
    if not bins:
        raise KeyError("no predictions")
    return [abs(b["predicted"] - b["actual"]) for b in bins]


# ---- batches -----------------------------------------------------------------------------------


def batches(f: Figures) -> Iterator[Line]:
    lambdas = ("agspec", "agspec:lam.5", "agspec:lam.7")
    versus: list[tuple[str, str, tuple[str, ...], tuple[float, ...]]] = [
        ("planner / AgSpec lambda .3", "planner", ("agspec",), (1.16, 1.15, 1.10, 1.04)),
        ("planner / AgSpec's best lambda", "planner", lambdas, (1.09, 1.07, 1.03, 1.03)),
        ("planner / AgentSpec's budget", "planner", ("agentspec:R-alg2",), (1.10,) * 4),
        (
            "hybrid / better one alone",
            "hybrid",
            ("planner", "hybrid:alone"),
            (1.33, 1.28, 1.28, 1.04),
        ),
    ]
    for claim, spec, others, bars in versus:
        for batch, bar in zip(BATCHES, bars, strict=True):
            yield at_least(
                f"{claim}, B = {batch}",
                bar,
                lambda s=spec, o=others, b=batch: (
                    f.goodput(s, b) / max(f.goodput(other, b) for other in o)
                ),
            )
    for claim, spec, prefix, bars in (
        ("planner / best static rule in hindsight", "planner", "static:", (1.03, 1.02, 1.00, 1.03)),
        ("hybrid / best thresholds in hindsight", "hybrid", "threshold:", (1.01,) * 4),
    ):
        for batch, bar in zip(BATCHES, bars, strict=True):
            yield at_least(
                f"{claim}, B = {batch}",
                bar,
                lambda s=spec, p=prefix, b=batch: f.goodput(s, b) / _best(f, p, b),
            )
    for batch, bar in (*((b, 0.995) for b in BATCHES), (128, 1.45), (256, 0.995)):
        yield at_least(
            f"planner / plain, B = {batch}", bar, lambda b=batch: f.goodput("planner", b)
        )
    for batch in (*BATCHES, 128, 256):
        yield at_least(
            f"hybrid / planner, B = {batch}",
            0.99,
            lambda b=batch: f.goodput("hybrid", b) / f.goodput("planner", b),
        )


def _best(f: Figures, prefix: str, batch: int) -> float:
    found = [
        value for s in f.specs(prefix) if (value := _looked_up(lambda s=s: f.goodput(s, batch)))
    ]
    if not found:
        raise KeyError(prefix)
    return max(found)


SECTIONS = {
    "agreement with known figures": agreement,
    "corpora": corpora,
    "survival": survival,
    "goodput": batches,
}


def main(config: Config) -> None:
    figures = Figures(read_summaries(config.inputs))
    lines = {title: list(section(figures)) for title, section in SECTIONS.items()}
    for title, found in lines.items():
        print(f"\n{title}")
        for line in found:
            value = "missing" if line.figure is None else f"{line.figure:.3f}"
            verdict = {None: "-", True: "met", False: "NOT MET"}[line.met]
            print(f"  {line.claim:54} {value:>8}  {line.bar:9} {verdict}")
    verdicts = [line.met for found in lines.values() for line in found]
    print(
        f"\n{verdicts.count(True)} met, {verdicts.count(False)} not met, "
        f"{verdicts.count(None)} not measured"
    )
    if False in verdicts:
        sys.exit(1)


if __name__ == "__main__":
    run(Config, main)
