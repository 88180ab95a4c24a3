"""What one session has read and written, indexed for its own drafts and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from dlite.drafters.lane import Lane, Lanes
from dlite.drafters.token_log import TokenLog, common_prefix
from dlite.retrieval.base import Index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlite.drafters.workspace import Workspace
    from dlite.types import OpenedFile

MAX_SCOPES = 16  # whose next prompt is recognised as their last one, continued
CONTEXT = 32  # tokens indexed again where a text goes on in another place than it stopped


class Scope(TokenLog):
    """All that one agent's run of calls has read and written so far, as its last call had it."""


class Session:
    """`version` changes when a call must connect anew. `learnt` is what drafters know of it."""

    def __init__(
        self, make_index: Callable[[], Index], workspace: Workspace | None, max_tokens: int
    ) -> None:
        self._make_index, self._max_tokens = make_index, max_tokens
        self.workspace = workspace
        self.learnt: dict[Hashable, Any] = {}
        self.version = 0
        self.num_running = 0
        self.used_at = 0.0
        self._lanes: dict[Hashable, Lanes] = {}
        self._scopes: list[Scope] = []  # the one used last stands last

    @property
    def num_tokens(self) -> int:
        files = self.workspace.num_tokens if self.workspace else 0
        return files + sum(lanes.num_tokens for lanes in self._lanes.values())

    def lanes(self, kind: Hashable) -> Lanes:
        if kind not in self._lanes:
            self._lanes[kind] = Lanes(self._make_index)
        return self._lanes[kind]

    def take_lane(self, lanes: Lanes, tail: object = None) -> Lane:
        known = len(lanes.lanes)
        lane = lanes.take(tail)
        self.version += len(lanes.lanes) > known
        return lane

    def make_room(self, lane: Lane, num_tokens: int) -> None:
        """Text is forgotten from the oldest on where the session would outgrow its limit."""
        if lane.size + num_tokens > self._max_tokens:
            lane.keep_newest(max(0, self._max_tokens // 2 - num_tokens))
            self.version += 1

    def read(
        self, lanes: Lanes, prompt: NDArray[np.int32]
    ) -> tuple[Lane, Scope, NDArray[np.int32]]:
        """A lane for a call, the scope that the call goes on, and what of the prompt is new.

        A lane that ends where the prompt goes on is continued without a seam.
        """
        shared = [(common_prefix(scope.tokens, prompt), scope) for scope in self._scopes]
        prefix, scope = max(shared, key=lambda pair: pair[0], default=(0, None))
        lane = self.take_lane(lanes, scope)
        goes_on = scope is not None and lane.tail is scope and prefix == len(scope)
        new = prompt[prefix if goes_on else max(0, prefix - CONTEXT) :][-self._max_tokens // 2 :]
        self.make_room(lane, len(new))
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

    def open(self, files: Iterable[OpenedFile]) -> None:
        if self.workspace:
            before = self.workspace.version
            for file in files:
                self.workspace.open(file)
            self.version += self.workspace.version - before

    def record(self, form: str, drafted: int, accepted: int) -> None:
        """How a draft from a form of a file fared; see `Workspace.record`."""
        if self.workspace:
            before = self.workspace.version
            self.workspace.record(form, drafted, accepted)
            self.version += self.workspace.version - before

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.close()
        for scope in self._scopes:
            scope.close()
        if self.workspace:
            self.workspace.close()
        self._lanes.clear()
        self._scopes.clear()
        self.learnt.clear()
