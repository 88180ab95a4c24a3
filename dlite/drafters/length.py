"""How many tokens AgSpec drafts: an offline cap, and a scale that follows the verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNCAPPED = 32  # where no cap was profiled
LOWEST_SCALE, HIGHEST_SCALE = 0.05, 4.0  # ours: long copies alone would drive it anywhere


@dataclass(frozen=True, slots=True)
class Caps:
    """K_max by agent, `shared` for all others. 0: that agent gets no drafts."""

    shared: int = UNCAPPED
    agents: dict[str, int] | None = None

    def of(self, agent: str) -> int:
        return (self.agents or {}).get(agent, self.shared)

    @classmethod
    def load(cls, name: str) -> Caps:
        """`none`, or a file of `{"shared": K, "agents": {name: K}}`, as profiled.

        Raises ValueError for any other content.
        """
        if name == "none":
            return cls()
        try:
            content: Any = json.loads(Path(name).read_text())
            caps = cls(content["shared"], content.get("agents", {}))
            sound = all(isinstance(k, int) and k >= 0 for k in (caps.shared, *caps.agents.values()))  # pyright: ignore
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} holds no caps ({error!r}); profile them again") from None
        if not sound:
            raise ValueError(f"{name} has a cap that is no integer >= 0; profile them again")
        return caps


@dataclass(slots=True)
class Scale:
    """alpha of one agent in one session: the stochastic subgradient of a quantile loss (AgSpec).

    A fully accepted draft teaches nothing where more tokens might have been accepted: at the
    cap, and where its continuation or the view ran out.
    """

    alpha: float = 1.0

    def length(self, match_length: int, cap: int) -> int:
        """round(alpha * m) within 1 .. cap, halves up; 0 without a match or where the cap is 0.

        m counts up to the cap only: else a long copy asks for many times the cap, whose failures
        lower alpha while its successes are skipped."""
        if match_length < 1 or cap < 1:
            return 0
        asked = math.floor(self.alpha * min(match_length, cap) + 0.5)
        return min(max(asked, 1), cap)

    def observe(
        self, drafted: int, accepted: int, asked: int, cap: int, *, target: float, rate: float
    ) -> None:
        """`target`: the share of drafts that should fail (tau = 1 - lambda)."""
        failed = accepted < drafted
        if not failed and (drafted >= cap or drafted < asked):
            return
        moved = self.alpha + rate * (target - failed)
        self.alpha = min(max(moved, LOWEST_SCALE), HIGHEST_SCALE)
