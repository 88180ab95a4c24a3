"""Which rank and which forward takes which sample of an optimizer step.

Samples are never padded to one another in a draft forward: their anchors lie behind each other.
So a forward is bounded by its tokens, and the number of samples in it follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from train.data import Sample

Share = list[list[Sample]]  # one rank's micro-batches


def deal(samples: Sequence[Sample], world: int, *, size: int = 0, tokens: int = 0) -> list[Share]:
    """The micro-batches of every rank, as many for each rank; an empty one has nothing to train.

    `tokens` bounds a micro-batch (a longer sample is alone in its own), and the longest samples
    are dealt first, always to the emptiest. Without it every rank takes each `world`-th sample, at
    most `size` of them at once (0: all). A function of its arguments alone.
    """
    if tokens:
        packed = _pack(samples, world, tokens)
        return [packed[rank::world] for rank in range(world)]
    shares = []
    for rank in range(world):
        mine = list(samples[rank::world])
        step = size or max(1, len(mine))
        shares.append([mine[i : i + step] for i in range(0, len(mine), step)])
    longest = max(1, *(len(share) for share in shares))
    return [share + [[] for _ in range(longest - len(share))] for share in shares]


def _pack(samples: Sequence[Sample], world: int, tokens: int) -> Share:
    """The smallest multiple of `world` bins that holds the samples, loaded evenly."""
    longest_first = sorted(samples, key=lambda s: (-len(s.input_ids), s.id))
    num_bins = 0
    while True:
        num_bins += world
        bins: Share = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for sample in longest_first:
            emptiest = loads.index(min(loads))
            bins[emptiest].append(sample)
            loads[emptiest] += len(sample.input_ids)
        if all(load <= tokens or len(b) == 1 for load, b in zip(loads, bins, strict=True)):
            return bins
