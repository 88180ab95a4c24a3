"""What optimizer steps did, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Step:
    """What an optimizer step did. `stats` and the counts are this rank's, the rest is global.

    `stop` is the number of a signal that some rank got, else 0.
    """

    loss: float
    grad_norm: float
    stats: dict[str, Tensor]
    num_anchors: int
    num_tokens: int
    num_supervised: int
    stop: int = 0


class Work:
    """What this rank did since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.counts = [0, 0, 0]

    def add(self, did: Step) -> None:
        done = did.num_anchors, did.num_tokens, did.num_supervised
        self.counts = [a + b for a, b in zip(self.counts, done, strict=True)]

    def speeds(self) -> list[float]:
        """Anchors, tokens and supervised tokens a second."""
        seconds = time.perf_counter() - self.began
        return [count / seconds for count in self.counts]
