"""What a verification step costs: T(N, B) for N tokens in a batch of B requests, and what a neural
draft adds to it."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dlite.model.drafter import DraftModel
    from dlite.target import TargetModel


@dataclass(kw_only=True)
class CostTable:
    """Step times at measured sizes; only their ratios matter, so any unit will do.

    `seconds[i][j]` is a step of `num_tokens[j]` tokens (anchors included) in a batch of
    `batch_sizes[i]`; between two sizes the time is interpolated, beyond the last it goes on rising
    as before. `padded`: steps are padded to a measured number of tokens (CUDA graphs), so the time
    is the next one's. `neural_seconds[i]` is a neural draft for that batch. Raises ValueError for
    sizes that do not rise, or times that are missing or not above 0.
    """

    batch_sizes: Sequence[int]
    num_tokens: Sequence[int]
    seconds: Sequence[Sequence[float]]
    neural_seconds: Sequence[float] = ()
    padded: bool = False
    _rows: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "num_tokens"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
                raise ValueError(f"{name} are {list(sizes)}; give rising numbers from 1 on")
        self.neural_seconds = self.neural_seconds or [0.0] * len(self.batch_sizes)
        shape = [len(self.batch_sizes), len(self.num_tokens)]
        if [len(self.seconds), *{len(row) for row in self.seconds}] != shape:
            raise ValueError(f"seconds is no table of {shape[0]} batch sizes by {shape[1]} tokens")
        if len(self.neural_seconds) != shape[0]:
            raise ValueError(f"{len(self.neural_seconds)} neural_seconds; give {shape[0]}")
        if not min(min(row) for row in self.seconds) > 0 or not min(self.neural_seconds) >= 0:
            raise ValueError("a step takes no time in seconds or neural_seconds; measure it again")

    def step_seconds(self, batch: int, longest: int) -> np.ndarray:
        """T(N, batch) for N = batch .. longest, which never falls."""
        row = self._rows.get(batch)
        if row is None or len(row) <= longest - batch:
            row = self._rows[batch] = self._row(batch, max(longest, 2 * batch, 64))
        return row[: longest - batch + 1]

    def _row(self, batch: int, longest: int) -> np.ndarray:
        sizes, wanted = np.array(self.num_tokens), np.arange(batch, longest + 1)
        times = _at(self.batch_sizes, self.seconds, batch)
        if self.padded:
            place = np.minimum(np.searchsorted(sizes, wanted), len(sizes) - 1)
            found = times[place]
        else:
            found = np.interp(wanted, sizes, times)
        if len(sizes) > 1:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            found = found + slope * np.maximum(wanted - sizes[-1], 0)
        return np.maximum.accumulate(found)

    def draft_seconds(self, batch: int) -> float:
        """A neural draft for `batch` requests."""
        return float(_at(self.batch_sizes, self.neural_seconds, batch))

    @classmethod
    def roofline(
        cls,
        ridge_tokens: int,
        *,
        per_token: float = 0.0,
        neural: tuple[float, float] = (0.0, 0.0),
    ) -> CostTable:
        """max(1, N / ridge) + per_token N, in steps that are bound by memory; a neural draft takes
        neural[0] + neural[1] B."""
        sizes = [1, ridge_tokens, 2 * ridge_tokens]
        return cls(
            batch_sizes=[1, 1024],
            num_tokens=sizes,
            seconds=[[max(1.0, n / ridge_tokens) + per_token * n for n in sizes]] * 2,
            neural_seconds=[neural[0] + neural[1] * batch for batch in (1, 1024)],
        )

    @classmethod
    def read(cls, path: Path | str) -> CostTable:
        """A JSON object of the class's fields. Raises ValueError for anything else."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no cost table: {error}") from None

    def write(self, path: Path | str) -> None:
        fields = {name: value for name, value in asdict(self).items() if name != "_rows"}
        Path(path).write_text(json.dumps(fields, indent=1) + "\n")


def _at(sizes: Sequence[int], values: Sequence, size: int) -> np.ndarray:
    """Values (numbers or rows) at `size`; the outermost ones beyond the sizes."""
    if size <= sizes[0]:
        return np.asarray(values[0], dtype=float)
    if size >= sizes[-1]:
        return np.asarray(values[-1], dtype=float)
    upper = bisect_left(sizes, size)
    share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    below, above = (np.asarray(values[i], dtype=float) for i in (upper - 1, upper))
    return below + share * (above - below)


def measure(
    target: TargetModel,
    batch_size: int,
    num_draft: int,
    model: DraftModel | None = None,
    *,
    context: int = 64,
    repeats: int = 3,
) -> CostTable:
    """Times `target` on its device: steps of 1 to 1 + `num_draft` tokens a request behind `context`
    others, and a draft of `model`. The shortest of `repeats` runs counts."""
    import torch

    widths = sorted({1, 2, 1 + num_draft // 4, 1 + num_draft // 2, 1 + num_draft})
    counts = [context] * batch_size
    rows = [[target.pad_id] * (context + widths[-1])] * batch_size

    @torch.no_grad()
    def step(width: int) -> None:
        tokens_BT = target.pad([row[:width] for row in rows])
        out = target.forward(tokens_BT, cache, counts_B=[width] * batch_size)
        # Verdicts are numbers on the host: a step has ended when these are there.
        target.logits(out.hidden_BTD.flatten(0, 1)).argmax(-1).tolist()

    cache = target.new_cache(batch_size, context + widths[-1])
    step(context)
    cache.advance(counts)
    times = [_best(partial(step, width), repeats) for width in widths]
    return CostTable(
        batch_sizes=[batch_size],
        num_tokens=[width * batch_size for width in widths],
        seconds=[np.maximum.accumulate(times).tolist()],
        neural_seconds=[0.0 if model is None else _draft_seconds(model, batch_size, repeats)],
    )


def _draft_seconds(model: DraftModel, batch_size: int, repeats: int) -> float:
    import torch

    from dlite.model.masks import Blocks

    config, weight = model.config, model.norm.weight
    anchor_A = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
    taps_ALD = weight.new_zeros(batch_size, len(config.tap_ids), config.hidden_size)
    confidence_AK = torch.empty(batch_size, config.num_draft_tokens, device=weight.device)

    def draft() -> None:
        tokens_AK, _ = model.draft(Blocks(anchor_A, taps_ALD), confidence_AK=confidence_AK)
        tokens_AK.tolist()

    return _best(draft, repeats)


def _best(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(1 + repeats):  # the first one warms up
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
