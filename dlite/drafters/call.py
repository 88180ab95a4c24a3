"""One running call: what it adds to its session, and the corpora that it looks into."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlite.drafters.block_tracker import BlockTracker, make_tracker
from dlite.drafters.lane import Label, Lane
from dlite.drafters.session import Session
from dlite.drafters.structure import TEXT, Structure
from dlite.retrieval.base import Continuation, Source
from dlite.types import Request, SourceClass

if TYPE_CHECKING:
    from dlite.tokens import TokenBytes

FED = 512  # last tokens that a new cursor is given: the longest match that it can know of
TRACKED = 64  # last tokens of a prompt that may open a block, as a template does


@dataclass(frozen=True, slots=True)
class Origin:
    """A corpus that a call looks into; `lane` None: the workspace or the static corpus."""

    source: SourceClass
    lane: Lane | None


class Call:
    """`live`, `files` and `static` are its sources; `origins` names them in this order."""

    def __init__(
        self,
        request: Request,
        session: Session,
        table: TokenBytes | None,
        history: str,
    ) -> None:
        """`history` is one of `memory.HISTORIES`."""
        self.request, self.session = request, session
        self.isolated = history == "blocks"  # a lane per agent, query and block
        self.private = history in ("own", "call")  # a lane that ends with the call
        self.tokens: Sequence[int] = request.prompt
        self.seen = len(request.prompt)
        self.version = -1
        self.live: list[Source] = []
        self.files: Source | None = None
        self.static: Source | None = None
        self.origins: list[Origin] = []
        self.tracker: BlockTracker | None = None
        self.blocks: dict[int, Hashable] = {TEXT: ()}  # labels by what opens them
        structure = request.agent.structure
        if structure is not None and table is not None:
            self.tracker = make_tracker(structure, table)
            self.tracker.feed(request.prompt[-TRACKED:])
            self.blocks |= _block_names(structure)
        self._taken: dict[Hashable, tuple[Lane, int]] = {}  # and where its own text begins
        if not self.isolated:
            self._read([] if history == "own" else request.prompt)
        self._enter(self.tracker.block if self.tracker else TEXT)

    def _read(self, prompt: list[int]) -> None:
        self.lanes = self.session.lanes(self.request.id if self.private else None)
        self.lane, self.scope, new = self.lanes.read(np.array(prompt, dtype=np.int32))
        agent = self.request.agent
        self.lane.label(Label(agent.agent_id, agent.query_id, None))
        self.lane.write(new)
        self._taken[None] = (self.lane, self.lane.size)

    # ---- writing ---------------------------------------------------------------------------

    def take(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of the tokens so far those that the own index still lacks, and those that are new."""
        new = list(tokens[self.seen :])
        self.seen, self.tokens = len(tokens), tokens
        lacking = new
        if self.tracker is not None:
            begin = 0
            for index, block in enumerate([*self.tracker.feed(new), self.tracker.block]):
                if block != self.block:
                    part, begin = new[begin:index], index
                    self.lane.index.extend(part)
                    self.lane.pending += part
                    self._enter(block)
            lacking = new[begin:]
        self.lane.pending += lacking
        return lacking, new

    def _enter(self, block: int) -> None:
        self.block = block
        agent = self.request.agent
        label = Label(agent.agent_id, agent.query_id, self.blocks[block])
        if self.isolated:
            self.lanes = self.session.lanes(label)
            if label not in self._taken:
                lane = self.lanes.take()
                self._taken[label] = (lane, lane.size)
            self.lane = self._taken[label][0]
            self.lane.end_segment()
            self.version = -1
        self.lane.label(label)
        self.label = label

    def seal(self) -> None:
        """The call has ended as it should: its text is its session's."""
        lacking, _ = self.take(self.tokens)
        self.lane.index.extend(lacking)
        for lane, _ in self._taken.values():
            lane.flush()
        self._release(self.tokens)

    def drop(self) -> None:
        """The call was aborted: what it generated is forgotten."""
        for lane, size in self._taken.values():
            if lane.cut(size):
                self.session.changed()
        self._release(self.request.prompt)

    def _release(self, tokens: Sequence[int]) -> None:
        if self.private:
            return self.session.forget(self.request.id)
        for lane, _ in self._taken.values():
            lane.busy = False
        if not self.isolated:
            self.lanes.remember(self.scope, np.array(tokens, dtype=np.int32))
            self.lane.tail = self.scope

    # ---- looking ---------------------------------------------------------------------------

    def connect(self, corpus: Any) -> None:
        """Follows, from the newest token on, all that there is now to look into."""
        self.version = self.session.version
        beside = self.lanes.beside(self.lane)
        self.live = [self.lane.index, *(self._follow(lane.index) for lane in beside)]
        files = self.session.workspace.index if self.session.workspace else None
        self.files = self._follow(files) if files is not None else None
        self.static = self._follow(corpus) if corpus is not None else None
        self.origins = [Origin(SourceClass.PROMPT, lane) for lane in (self.lane, *beside)]
        if self.files is not None:
            self.origins.append(Origin(SourceClass.WORKSPACE, None))
        if self.static is not None:
            self.origins.append(Origin(SourceClass.GLOBAL, None))

    def _follow(self, corpus: Any) -> Source:
        cursor = corpus.cursor()
        cursor.extend(list(self.tokens[-FED:]))
        return cursor

    def source_class(self, origin: Origin, found: Continuation) -> SourceClass:
        if origin.lane is None or found.start < 0:
            return origin.source
        written = origin.lane.label_at(found.start)
        if written.block is None:
            return SourceClass.PROMPT
        if written == self.label:
            return SourceClass.SAME_BLOCK
        same = written.block == self.label.block
        return SourceClass.OTHER_QUERY if same else SourceClass.OTHER_BLOCK


def _block_names(structure: Structure) -> dict[int, Hashable]:
    """A group's number means nothing in another request's structure; its delimiters do."""
    groups = {pair.group for pair in structure.pairs}
    return {
        group: tuple(sorted(pair.open for pair in structure.pairs if pair.group == group))
        for group in groups
    }
