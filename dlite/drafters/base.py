"""The seam between a decoding loop and whatever proposes tokens for it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from dlite.types import Draft, Request, SessionKey, Verdict, View


class Drafter(Protocol):
    """Proposes tokens. Never sees the target, the engine or the budget.

    `tap_ids` are the target layers (id k = output of 0-based decoder layer k; the last layer is
    read after the final norm) whose hidden states it wants in `View.taps_LD`; empty: none.
    """

    name: str
    tap_ids: tuple[int, ...]

    def start(self, request: Request) -> None: ...

    def propose(self, views: list[View]) -> list[Draft]: ...

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None: ...

    def finish(self, request: Request) -> None:
        """Ends the call and seals it into its session."""
        ...

    def abort(self, request: Request) -> None:
        """Ends a call that broke off: what it generated is forgotten."""
        ...

    def close(self, session: SessionKey) -> None:
        """Destroys the session's private corpora."""
        ...


@runtime_checkable
class PlansAlone(Protocol):
    """A drafter that needs no other's drafts to have its own cut by a planner."""

    def propose_within(
        self, views: list[View], seconds_N: np.ndarray, guard: float
    ) -> list[Draft] | None:
        """`propose`, cut as `dlite.slots.plan` would; None: the planner has to do it."""
        ...


@runtime_checkable
class ReadsHistory(Protocol):
    """A drafter that needs the target's states of all positions, not only of the last one."""

    def read(self, requests: list[Request], taps_BTLD: Tensor, counts: list[int]) -> None:
        """The first `counts[b]` of T positions follow those read before for `requests[b]`.

        Called after the prefill of new requests, and after each verification with every running
        request: the anchor and the accepted tokens. Layers in the drafter's `tap_ids` order.
        """
        ...
