"""T(N, B) of this engine: measured at its start, kept for the next, corrected by each step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dlite.costs import CostTable
from dlite.serve import cache_folder

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LIMIT_SECONDS = 20.0
SHARE = 0.05  # of a step in its cell's running mean: some 20 steps are remembered


class StepTimes:
    """A CostTable that follows the engine. `step(n)` runs a target forward of n tokens through its
    logits, `draft(b)` (None: no draft model) a neural draft for b requests."""

    def __init__(
        self,
        step: Callable[[int], object],
        draft: Callable[[int], object] | None,
        *,
        max_batch: int,
        num_draft: int,
        cache: Path | None = None,
    ) -> None:
        costs = CostTable.read(cache) if cache and cache.is_file() else None
        if costs is None:
            costs = measure(step, draft, max_batch=max_batch, num_draft=num_draft)
            if cache:
                cache.parent.mkdir(parents=True, exist_ok=True)
                costs.write(cache)
        self.costs = costs

    @property
    def ridge_tokens(self) -> int:
        """Tokens at which arithmetic takes as long as reading the weights: a step of twice as many
        takes twice as long as one of a single token."""
        seconds_N = self.costs.step_seconds(1, self.costs.num_tokens[-1])
        return (1 + int((seconds_N < 2 * seconds_N[0]).sum())) // 2

    def observe(self, num_tokens: int, batch: int, seconds: float) -> None:
        """A step that decoded `batch` requests took so long."""
        costs = self.costs
        i, j = _nearest(costs.batch_sizes, batch), _nearest(costs.num_tokens, num_tokens)
        old = float(costs.step_seconds(batch, num_tokens)[-1])
        row = costs.seconds[i]
        assert isinstance(row, list)
        row[j] += SHARE * (min(seconds, 10 * old) / old - 1) * row[j]  # one hiccup is no trend
        costs._rows.clear()


def measure(
    step: Callable[[int], object],
    draft: Callable[[int], object] | None,
    *,
    max_batch: int,
    num_draft: int,
    limit_seconds: float = LIMIT_SECONDS,
) -> CostTable:
    """Every step size twice, the shorter time; as many sizes as fit into `limit_seconds`.

    A start-up step attends to nothing before it: what attention adds comes with the corrections.
    """
    batches = [b for b in BATCHES if b <= max_batch]
    sizes = sorted({1, 2, 4, *batches, *(b * (1 + num_draft) for b in batches)})
    begin = time.perf_counter()
    seconds: list[float] = []
    for size in sizes:
        if len(seconds) > 2 and time.perf_counter() - begin > limit_seconds:
            break
        seconds.append(_best(lambda size=size: step(size)))
    row = np.maximum.accumulate(seconds).tolist()
    neural = [0.0] * len(batches)
    if draft is not None:
        for place, batch in enumerate(batches):
            if place > 1 and time.perf_counter() - begin > 1.5 * limit_seconds:
                neural[place] = neural[place - 1] * batch / batches[place - 1]
            else:
                neural[place] = _best(lambda batch=batch: draft(batch))
    return CostTable(
        batch_sizes=batches,
        num_tokens=sizes[: len(row)],
        seconds=[list(row) for _ in batches],
        neural_seconds=neural,
    )


def cache_file(*what: object) -> Path:
    """One file per model, device and size of the engine."""
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{name}.json"


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):  # the first one warms up
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _nearest(sizes: Sequence[int], size: int) -> int:
    return min(range(len(sizes)), key=lambda i: abs(sizes[i] - size))
