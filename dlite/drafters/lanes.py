"""The lanes of one kind of text, and whose prompts go on from where in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dlite.drafters.lane import Lane
from dlite.drafters.token_log import TokenLog, common_prefix
from dlite.retrieval.base import Index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_LANES = 8  # that a call looks into: work per round is bounded, however many calls run
MAX_SCOPES = 16  # whose next prompt is recognised as their last one, continued
CONTEXT = 32  # tokens indexed again where a text goes on in another place than it stopped


class Scope(TokenLog):
    """All that one agent's run of calls has read and written so far, as its last call had it."""


class Lanes:
    """`changed` is called when a lane is new or rebuilt. Text is forgotten from the oldest on
    where a lane would outgrow `max_tokens`."""

    def __init__(
        self, make_index: Callable[[], Index], max_tokens: int, changed: Callable[[], None]
    ) -> None:
        self._make_index, self._max_tokens, self._changed = make_index, max_tokens, changed
        self._lanes: list[Lane] = []  # the one used last stands last
        self._scopes: list[Scope] = []  # likewise

    @property
    def num_tokens(self) -> int:
        return sum(lane.size for lane in self._lanes)

    def take(self, tail: Scope | None = None, num_tokens: int = 0) -> Lane:
        """A lane that no call extends, with room for `num_tokens`: the one that ends with `tail`,
        else the one used last, else a new one."""
        idle = [lane for lane in self._lanes if not lane.busy]
        ending = [lane for lane in idle if tail is not None and lane.tail is tail]
        lane = (ending or idle or [None])[-1]
        if lane is None:
            lane = Lane(self._make_index)
            self._changed()
        else:
            self._lanes.remove(lane)
        self._lanes.append(lane)
        if lane.size + num_tokens > self._max_tokens:
            lane.keep_newest(max(0, self._max_tokens // 2 - num_tokens))
            self._changed()
        lane.busy = True
        return lane

    def read(self, prompt: NDArray[np.int32]) -> tuple[Lane, Scope, NDArray[np.int32]]:
        """A lane for a call, the scope that the call goes on, and what of the prompt is new.

        A lane that ends where the prompt goes on is continued without a seam.
        """
        shared = [(common_prefix(scope.tokens, prompt), scope) for scope in self._scopes]
        prefix, scope = max(shared, key=lambda pair: pair[0], default=(0, None))
        lane = self.take(scope, len(prompt) - prefix + CONTEXT)
        goes_on = scope is not None and lane.tail is scope and prefix == len(scope)
        new = prompt[prefix if goes_on else max(0, prefix - CONTEXT) :][-self._max_tokens // 2 :]
        if not goes_on:
            lane.end_segment()
        lane.tail = None
        if scope is None or 2 * prefix < len(scope):
            scope = Scope()
        return lane, scope, new

    def remember(self, scope: Scope, tokens: NDArray[np.int32]) -> None:
        prefix = common_prefix(scope.tokens, tokens)
        scope.cut(prefix)
        scope.append(tokens[prefix:])
        self._scopes = [other for other in self._scopes if other is not scope] + [scope]
        for forgotten in self._scopes[:-MAX_SCOPES]:
            forgotten.close()
        del self._scopes[:-MAX_SCOPES]

    def beside(self, own: Lane) -> list[Lane]:
        return [lane for lane in self._lanes if lane is not own][1 - MAX_LANES :]

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        for scope in self._scopes:
            scope.close()
        self._lanes.clear()
        self._scopes.clear()
