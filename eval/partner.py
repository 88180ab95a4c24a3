"""A draft model that is known by its acceptance alone, for replays without any target."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from dlite.types import Draft, Request, SessionKey, Verdict, View

# Conditional acceptance of a DLite's seven tokens as its paper's tables suggest it for code; in
# sum 3.27 tokens per step. Not measured here.
RATES = (0.75, 0.72, 0.70, 0.68, 0.66, 0.64, 0.62)


class SimulatedDrafter:
    """Drafts a prefix of what the record says, and then wrong tokens. How long the prefix is was
    drawn for every position of every call before any drafter ran: independent of retrieval, and
    the same in every replay with the same seed.

    `outputs` are the recorded outputs by call id; a request's id ends with its call's.
    """

    name = "simulated"
    tap_ids: tuple[int, ...] = (0,)  # it stands for a drafter that reads the target's states

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        *,
        seed: int = 0,
        rates: Sequence[float] = RATES,
        cost: Callable[[int], float] = lambda batch: 0.0,
    ) -> None:
        """`cost`: of a proposal for so many requests."""
        self.outputs, self.seed, self.cost = outputs, seed, cost
        self._fails = 1 - np.array(list(accumulate(rates, mul)))  # P(prefix < 1), P(prefix < 2)
        self._spent = 0.0
        self._truth: dict[str, tuple[Sequence[int], list[int]]] = {}

    def start(self, request: Request) -> None:
        call_id = request.id.partition(" ")[2]
        output = self.outputs[call_id]
        draws = np.random.default_rng((zlib.crc32(call_id.encode()), self.seed)).random(len(output))
        right = np.searchsorted(self._fails, draws, side="right")
        self._truth[request.id] = output, right.tolist()

    def propose(self, views: list[View]) -> list[Draft]:
        self._spent += self.cost(len(views))
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        output, right = self._truth[view.request.id]
        done = len(view.tokens) - len(view.request.prompt)
        num_draft = min(len(self._fails), view.max_draft)
        tokens = list(output[done : done + min(right[done - 1], num_draft)])
        after = output[done + len(tokens)] if done + len(tokens) < len(output) else 0
        return Draft(tokens + [after + 1] * (num_draft - len(tokens)), source=self.name)

    def take_cost(self) -> float:
        """What the proposals since the last call cost."""
        spent, self._spent = self._spent, 0.0
        return spent

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        del self._truth[request.id]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
