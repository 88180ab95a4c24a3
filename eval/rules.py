"""Rules of thumb in a planner's place: by match length alone, the same at every step. A grid of
them, the best picked afterwards for each batch size, is what a planner has to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlite.types import Choice, Draft, Request, Verdict, View


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A retrieved draft of `factor` times its match's length, at most `cap`, where the match has
    at least `min_match` tokens; else the first `num_neural` tokens of the draft model's."""

    min_match: int = 1
    factor: int = 1
    cap: int = 32
    num_neural: int = 0

    def run_neural(
        self, name: str, views: Sequence[View], drafts: Mapping[str, list[Draft]]
    ) -> bool:
        (retrieved,) = drafts.values()
        return self.num_neural > 0 and any(
            self._match(draft) < self.min_match for draft in retrieved
        )

    def select(self, views: Sequence[View], drafts: Mapping[str, list[Draft]]) -> list[Choice]:
        (name, retrieved), *neural = drafts.items()
        return [
            self._choose(name, draft, [(other, made[row]) for other, made in neural])
            for row, draft in enumerate(retrieved)
        ]

    def _choose(self, name: str, draft: Draft, neural: Sequence[tuple[str, Draft]]) -> Choice:
        match = self._match(draft)
        if match >= self.min_match:
            return Choice(name, draft.cut(min(self.factor * match, self.cap)))
        for other, made in neural:
            return Choice(other, made.cut(self.num_neural))
        return Choice(name, Draft())

    def _match(self, draft: Draft) -> int:
        return draft.evidence.match_length if draft.evidence else 0

    def observe(
        self, request: Request, proposed: Mapping[str, Draft], draft: Draft, verdict: Verdict
    ) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass
