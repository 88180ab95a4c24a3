"""What one session has read and written, indexed for its own drafts and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlite.drafters.lanes import Lanes
from dlite.retrieval.base import Index

if TYPE_CHECKING:
    from dlite.drafters.workspace import Workspace
    from dlite.types import OpenedFile


@dataclass(frozen=True, slots=True)
class Label:
    """Who wrote a stretch of text, and in which block; `block` None: a prompt, a tool output."""

    agent: str
    query: str
    block: Hashable


class Session:
    """`version` changes when its calls must connect anew. `learnt` is what drafters know of it."""

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
        self._writers: dict[tuple[str, str], int] = {}
        self._blocks: dict[Hashable, int] = {None: 0}

    @property
    def num_tokens(self) -> int:
        files = self.workspace.num_tokens if self.workspace else 0
        return files + sum(lanes.num_tokens for lanes in self._lanes.values())

    def changed(self) -> None:
        self.version += 1

    def label(self, label: Label) -> int:
        """A number for it: the writer's << 32 | the block's, which is 0 for a prompt."""
        writer = self._writers.setdefault((label.agent, label.query), len(self._writers))
        return writer << 32 | self._blocks.setdefault(label.block, len(self._blocks))

    def lanes(self, kind: Hashable) -> Lanes:
        if kind not in self._lanes:
            self._lanes[kind] = Lanes(self._make_index, self._max_tokens, self.changed)
        return self._lanes[kind]

    def forget(self, kind: Hashable) -> None:
        self._lanes.pop(kind).close()

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
        if self.workspace:
            self.workspace.close()
        self._lanes.clear()
        self._writers.clear()
        self.learnt.clear()
