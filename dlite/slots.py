"""Which slots of a step are worth their time, in pure Python: the twin of `native/plan.hpp`.

A slot (request, position) is worth its survival. Survivals never increase along a draft, so taking
slots in order of worth keeps drafts whole and gives the most tokens for every total. A request that
can choose between drafts has, for k slots, the best cut of any of them; slots are then taken by the
slopes of the least concave function above that, and gain what they really give.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile

import numpy as np

Curve = Sequence[float]  # survival of a draft's tokens 1, 2, ...: never increases


def plan(
    options: Sequence[Sequence[Curve]], seconds: np.ndarray, guard: float
) -> tuple[list[tuple[int, int]], float]:
    """The (option, length) of each request with the most expected tokens per second, and those.

    `options[b]` are request b's curves to choose from; `seconds[n]`, which must not fall, is a step
    that verifies n draft tokens behind the anchors. A gain up to the share `guard` is left alone.
    """
    batch, times = len(options), seconds.tolist()
    plain = rate = batch / times[0]
    steps = [later - sooner for sooner, later in pairwise(times)]
    cheapest = [*accumulate(reversed(steps), min)][::-1]  # the least time of a token from here on
    # A token that survives no likelier than this costs more than it can give, in any plan.
    worthless = plain * min(steps, default=times[0])
    menus = [
        _Menu([[*takewhile(lambda s: s > worthless, curve)] for curve in curves])
        for curves in options
    ]
    queue = [(-menu.worths[0], row) for row, menu in enumerate(menus) if menu.worth(0) > 0]
    heapq.heapify(queue)
    taken, order, best = [0] * batch, [], 0
    tokens = float(batch)
    for n, least in enumerate(cheapest):
        if not queue or -queue[0][0] <= rate * least:
            break
        row = heapq.heappop(queue)[1]
        menu = menus[row]
        taken[row] += 1
        tokens += menu.best[taken[row]][0] - menu.best[taken[row] - 1][0]
        order.append(row)
        if tokens / times[n + 1] > rate:
            rate, best = tokens / times[n + 1], len(order)
        if menu.worth(taken[row]) > 0:
            heapq.heappush(queue, (-menu.worth(taken[row]), row))
    if rate <= (1 + guard) * plain:
        return [(0, 0)] * batch, plain
    for row in order[best:]:
        taken[row] -= 1
    return [menu.best[k][1:] for menu, k in zip(menus, taken, strict=True)], rate


class _Menu:
    """`best[k]` is the most that k slots of a request promise, and the option and length for it;
    `worths` are the slopes of its concave majorant."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.best: list[tuple[float, int, int]] = [(0.0, 0, 0)] * (
            1 + max(map(len, curves), default=0)
        )
        for option, curve in enumerate(curves):
            for k, total in enumerate(accumulate(curve), start=1):
                if total > self.best[k][0]:
                    self.best[k] = (total, option, k)
        self.best = [*accumulate(self.best, lambda a, b: a if b[0] < a[0] else b)]
        runs: list[tuple[float, float, int]] = []  # worth, gain, slots
        for before, after in pairwise(self.best):
            worth = gain = after[0] - before[0]
            slots = 1
            while runs and runs[-1][0] < worth:
                _, more, others = runs.pop()
                gain += more
                slots += others
                worth = gain / slots
            runs.append((worth, gain, slots))
        self.worths = [worth for worth, _, slots in runs for _ in range(slots)]

    def worth(self, taken: int) -> float:
        return self.worths[taken] if taken < len(self.worths) else -1.0
