"""Which drafters a replay compares: by name and variant, out of the library's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from dlite.budget import Budget, agentspec
from dlite.costs import CostTable
from dlite.drafters.base import Drafter
from dlite.drafters.registry import build
from dlite.hybrid import Hybrid
from dlite.planner import Chooser, Planner
from eval.lookup import PromptLookup
from eval.partner import SimulatedDrafter
from eval.profile import CAPS_FILE, CORPUS_FOLDER, ONE_BLOCK_PRIORS_FILE, PRIORS_FILE
from eval.recorded import CallRecord, RecordedDrafter
from eval.rules import Thresholds

NEURAL_COST = (0.08, 0.0003)  # of a step bound by memory: per draft, and for each request


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What drafters are built from. `profile` is a folder of `eval.profile`; `records` gives
    RECORDED's drafts at every position."""

    tokenizer: Any
    outputs: Mapping[str, list[int]]
    costs: CostTable
    ridge: int
    records: Callable[[], Mapping[str, CallRecord]]
    profile: Path | None = None
    seed: int = 0

    def in_profile(self, name: str) -> str:
        if self.profile is None:
            raise ValueError(f"{name} is missing; add profile=DIR, made by python -m eval.profile")
        return str(self.profile / name)


@dataclass(frozen=True)
class Variant:
    """A drafter of the library with options. `chooser` plans or budgets its drafts; `corpus`: with
    the profile's static corpus; `caps`: with its caps for this lambda; `partner`: beside a
    simulated draft model; `structure`: blocks are followed."""

    drafter: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    chooser: Callable[[Setting], Chooser] | None = None
    corpus: bool = False
    caps: str | None = None
    partner: bool = False
    structure: bool = False
    rule: Thresholds | None = None

    @property
    def apart(self) -> bool:
        """Whether a request's drafts are the same in every batch."""
        return self.chooser is None

    def build(self, setting: Setting) -> tuple[Drafter, SimulatedDrafter | None]:
        """The drafter, and the partner that is part of it."""
        drafters: list[Drafter] = []
        partner = None
        if self.drafter == "recorded":
            drafters.append(RecordedDrafter(setting.records(), setting.outputs))
        elif self.drafter == "pld":
            drafters.append(PromptLookup(**self.options))
        elif self.drafter is not None:
            options = dict(self.options)
            if self.corpus:
                options["corpus"] = setting.in_profile(CORPUS_FOLDER)
            if self.drafter == "survival":
                name = PRIORS_FILE if self.structure else ONE_BLOCK_PRIORS_FILE
                options["priors"] = setting.in_profile(name)
            if self.caps:
                options["caps"] = setting.in_profile(CAPS_FILE.format(self.caps))
            drafters.append(build(self.drafter, options, tokenizer=setting.tokenizer))
        if self.partner:
            partner = SimulatedDrafter(
                setting.outputs, seed=setting.seed, cost=setting.costs.draft_seconds
            )
            drafters.append(partner)
        chooser = self.rule if self.chooser is None else self.chooser(setting)
        if chooser is None:
            (drafter,) = drafters
            return drafter, partner
        return Hybrid(drafters, chooser), partner


def _budget(form: str) -> Callable[[Setting], Chooser]:
    return lambda setting: Budget(agentspec(form=form), setting.ridge)


def _planned(setting: Setting) -> Chooser:
    return Planner(setting.costs)


# A copy of the match's length from the most recent place, where AgSpec's own rules are not meant.
COPY = {"live_rule": "recent", "workspace_rule": "recent", "online": False}
# The same, by the longest match whatever corpus it is in.
EVEN = {**COPY, "delta": 0}

# All that the best corpora hold, for a rule to cut.
RECORDED = Variant("agspec", {**EVEN, "num_draft": 32}, corpus=True)


STATIC = {
    f"m{match}-x{factor}-cap{cap}": Variant(
        "recorded", rule=Thresholds(min_match=match, factor=factor, cap=cap)
    )
    for match, factor, cap in product((1, 4), (1, 2, 32), (2, 4, 6, 12, 32))
}
# Long drafts for small batches, short ones for large batches.
_LIMITS = [
    *product((3, 6), (1, 32), (32,), (2, 4, 7)),
    *product((3, 6), (1,), (4, 8), (1, 2, 3)),
]
THRESHOLDS = {
    f"m{match}-x{factor}-cap{cap}-K{k}": Variant(
        "recorded",
        partner=True,
        rule=Thresholds(min_match=match, factor=factor, cap=cap, num_neural=k),
    )
    for match, factor, cap, k in _LIMITS
}

LINEUP: dict[str, dict[str, Variant]] = {
    "ngram": {
        "": Variant("ngram"),
        "pld5": Variant("pld", {"num_draft": 5}),
        "pld10": Variant("pld", {"num_draft": 10}),
    },
    "sam": {
        "": Variant("sam"),
        "own": Variant("sam", {"history": "own"}),
        "first": Variant("sam", {"live_rule": "first"}),
        "vote": Variant("sam", {"live_rule": "vote"}),
        "session": Variant("sam", {"history": "session"}),
    },
    "suffix": {"": Variant("suffix")},
    "agentspec": {
        "": Variant("agentspec", {"length": "all"}, _budget("eq1"), structure=True),
        "strict": Variant("agentspec", structure=True),
        "S": Variant("agentspec", {"variant": "S"}, structure=True),
        "R": Variant("agentspec", {"variant": "R", "length": "all"}, _budget("eq1")),
        "R-alg2": Variant("agentspec", {"variant": "R", "length": "all"}, _budget("alg2")),
        "N": Variant("agentspec", {"variant": "N"}),
        "class": Variant("agentspec", {"mode": "class"}, structure=True),
    },
    "agspec": {
        "": Variant("agspec", {"lam": 0.3}, corpus=True),
        "lam.5": Variant("agspec", {"lam": 0.5}, corpus=True),
        "lam.7": Variant("agspec", {"lam": 0.7}, corpus=True),
        "caps.3": Variant("agspec", {"lam": 0.3}, corpus=True, caps="0.3"),
        "caps.5": Variant("agspec", {"lam": 0.5}, corpus=True, caps="0.5"),
        "caps.7": Variant("agspec", {"lam": 0.7}, corpus=True, caps="0.7"),
        "K=8": Variant("agspec", {"num_draft": 8}, corpus=True),
        "K=32": Variant("agspec", {"num_draft": 32}, corpus=True),
        "offline": Variant("agspec", {"lam": 0.3, "online": False}, corpus=True),
        "own": Variant("agspec", {**COPY, "history": "own", "workspace": False}),
        "call": Variant("agspec", {**COPY, "history": "call", "workspace": False}),
        "+session": Variant("agspec", {**COPY, "workspace": False}),
        "+workspace": Variant("agspec", {**COPY, "forms": ["full"]}),
        "+forms": Variant("agspec", COPY),
        "+allforms": Variant(
            "agspec", {**COPY, "forms": ["full", "json", "denumber", "space", "minus", "plus"]}
        ),
        "+global": Variant("agspec", COPY, corpus=True),
        "+global0": Variant("agspec", EVEN, corpus=True),
    },
    "rest": {"": Variant("rest", corpus=True)},
    "planner": {
        "": Variant("survival", {}, _planned, corpus=True, structure=True),
        "S.003": Variant("survival", {"threshold": 0.003}, corpus=True, structure=True),
        "S.003-no-blocks": Variant("survival", {"threshold": 0.003}, corpus=True),
        "S.2": Variant("survival", {"threshold": 0.2}, corpus=True, structure=True),
        "S.5": Variant("survival", {"threshold": 0.5}, corpus=True, structure=True),
        "S.6": Variant("survival", {"threshold": 0.6}, corpus=True, structure=True),
    },
    "static": STATIC,
    "threshold": THRESHOLDS,
    "hybrid": {
        "": Variant("survival", {}, _planned, corpus=True, partner=True, structure=True),
        "alone": Variant(None, {}, _planned, partner=True),
    },
}

LINEUP["arctic"] = {
    name: replace(variant, options={**variant.options, "engine": "arctic"})
    for name, variant in LINEUP["agspec"].items()
    if name in ("", "own", "call") or name.startswith("+")
}


def find(spec: str) -> Variant:
    """Of `name` or `name:variant`. Raises ValueError for one that isn't there."""
    name, _, variant = spec.partition(":")
    if variant not in LINEUP.get(name, {}):
        known = ", ".join(f"{n}:{v}" if v else n for n in LINEUP for v in LINEUP[n])
        raise ValueError(f"unknown drafter {spec!r}; choose from {known}")
    return LINEUP[name][variant]


def expand(specs: list[str]) -> list[str]:
    """`name:*` stands for all of a name's variants."""
    full = []
    for spec in specs:
        name = spec.removesuffix(":*")
        if spec.endswith(":*") and name in LINEUP:
            full += [f"{name}:{variant}" if variant else name for variant in LINEUP[name]]
        else:
            full.append(spec)
    return full
