"""Who may draft how much: token budgets as the papers give them, never above M(b).

M(b) = max(0, ridge - b) is the head-room of a verification step at batch b: the ridge point of the
device in tokens, less one token a request. `dlite.planner` decides by expected gain instead.

A rule shares a budget among drafts, given each request's acceptance rate so far: lengths of at
most `len(draft.tokens)` each and `budget` in sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dlite.types import Choice, Draft, Request, Verdict, View

Rule = Callable[[Sequence[Draft], Sequence[float], int], list[int]]
SUPPORT_SHIFTS = {"eq1": 1.0, "alg2": 0.0}  # AgentSpec's p(n): e^(1-n), e^(-n) in Algorithm 2


def uniform(drafts: Sequence[Draft], rates: Sequence[float], budget: int) -> list[int]:
    """The same length for all, as far as their drafts reach."""
    return _best_slots([[-k for k in range(len(draft.tokens))] for draft in drafts], budget)


def adaspec(drafts: Sequence[Draft], rates: Sequence[float], budget: int) -> list[int]:
    """By each request's own acceptance rate r, as AgentSpec's paper describes AdaSpec (Huang et
    al. 2026): the k-th token of its draft is worth r^k."""
    worth = [
        [rate**k for k in range(1, len(draft.tokens) + 1)]
        for draft, rate in zip(drafts, rates, strict=True)
    ]
    return _best_slots(worth, budget)


def _best_slots(worth: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many of each row's slots are among the `budget` best; a row's worth never increases."""
    rows = np.repeat(np.arange(len(worth)), [len(row) for row in worth])
    flat = np.array([value for row in worth for value in row], dtype=float)
    best = np.argsort(-flat, kind="stable")[:budget]
    return np.bincount(rows[best], minlength=len(worth)).tolist()


def agentspec(*, g_min: float = 0.3, form: str = "eq1") -> Rule:
    """By redundancy g (AgentSpec, equation 3 and Algorithm 2): at least the consensus prefix, and
    a share of the budget that is proportional to g.

    The equation's maximum alone can exceed the budget: then slots of the lowest g go, from the
    ends of their drafts. Raises ValueError for an unknown form or a `g_min` outside [0, 1], and
    the rule does for a draft that doesn't say how many candidates agree.
    """
    if form not in SUPPORT_SHIFTS:
        raise ValueError(f"form is {form!r}; choose {' or '.join(SUPPORT_SHIFTS)}")
    if not 0 <= g_min <= 1:
        raise ValueError(f"g_min is {g_min}; give a number in [0, 1]")
    return partial(_by_redundancy, g_min=g_min, form=form)


def redundancy(votes: int, support: int, *, g_min: float = 0.3, form: str = "eq1") -> float:
    """AgentSpec's g(c, n) = c/n p(n), p(n) = g_min + (1 - g_min)(1 - e^(1-n)) (equation 1).

    `form="alg2"` is Algorithm 2's e^(-n), which trusts a single candidate more. 0 for none.
    """
    if support == 0:
        return 0.0
    return votes / support * (1 - (1 - g_min) * math.exp(SUPPORT_SHIFTS[form] - support))


def _by_redundancy(
    drafts: Sequence[Draft], rates: Sequence[float], budget: int, *, g_min: float, form: str
) -> list[int]:
    scores = [_score(draft, g_min, form) for draft in drafts]
    total = sum(scores)
    lengths = [
        min(len(draft.tokens), max(_agreed(draft), math.floor(budget * score / total)))
        if score > 0
        else 0
        for draft, score in zip(drafts, scores, strict=True)
    ]
    return _trim(lengths, scores, budget)


def _score(draft: Draft, g_min: float, form: str) -> float:
    if not draft.tokens:
        return 0.0
    if draft.evidence is None:
        raise ValueError(
            f"drafter {draft.source!r} counts no candidates, which the agentspec budget goes by; "
            "use it with a retrieval drafter, or take the budget uniform or adaspec"
        )
    return redundancy(draft.evidence.votes, draft.evidence.support, g_min=g_min, form=form)


def _agreed(draft: Draft) -> int:
    return 0 if draft.evidence is None else draft.evidence.agreed


def _trim(lengths: list[int], scores: list[float], budget: int) -> list[int]:
    """Drops the slots of the lowest (score, position from the end, row) until `budget` are left."""
    slots = [
        (score, position, row)
        for row, (length, score) in enumerate(zip(lengths, scores, strict=True))
        for position in range(length)
    ]
    for _, _, row in sorted(slots)[: max(0, len(slots) - budget)]:
        lengths[row] -= 1
    return lengths


@dataclass
class Budget:
    """A rule under M(b), in a planner's place.

    `alpha`: the budget is also at most floor(alpha / b) (AgentSpec, equation 2). Of several
    drafters the first that drafts is heard. Raises ValueError for values below 0.
    """

    rule: Rule
    ridge_tokens: int
    alpha: float | None = None
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ridge_tokens", "alpha"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; give a number >= 0")

    def tokens(self, batch: int) -> int:
        """What a step of `batch` requests may draft in sum."""
        head_room = max(0, self.ridge_tokens - batch)
        return head_room if self.alpha is None else min(head_room, math.floor(self.alpha / batch))

    def run_neural(
        self, name: str, views: Sequence[View], drafts: Mapping[str, list[Draft]]
    ) -> bool:
        return True

    def select(self, views: Sequence[View], drafts: Mapping[str, list[Draft]]) -> list[Choice]:
        names = list(drafts)
        heard = [
            next((name for name in names if drafts[name][row].tokens), names[0])
            for row in range(len(views))
        ]
        whole = [drafts[name][row] for row, name in enumerate(heard)]
        rates = [self._rate(view.request) for view in views]
        lengths = self.rule(whole, rates, self.tokens(len(views)))
        return [
            Choice(name, draft.cut(length))
            for name, draft, length in zip(heard, whole, lengths, strict=True)
        ]

    def _rate(self, request: Request) -> float:
        accepted, drafted = self._counts.get(request.id, (0, 0))
        return (accepted + 1) / (drafted + 2)

    def observe(
        self, request: Request, proposed: Mapping[str, Draft], draft: Draft, verdict: Verdict
    ) -> None:
        accepted, drafted = self._counts.get(request.id, (0, 0))
        self._counts[request.id] = (
            accepted + verdict.num_accepted,
            drafted + len(draft.tokens),
        )

    def finish(self, request: Request) -> None:
        self._counts.pop(request.id, None)
