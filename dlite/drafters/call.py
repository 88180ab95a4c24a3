"""One running call: what it adds to its session, and the corpora that it looks into."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlite.drafters.block_tracker import BlockTracker, make_tracker
from dlite.drafters.lane import Lane
from dlite.drafters.reader import make_reader
from dlite.drafters.session import Label, Session
from dlite.drafters.structure import TEXT, Structure
from dlite.retrieval.base import Continuation, Source
from dlite.types import Request, SourceClass

if TYPE_CHECKING:
    from dlite.drafters.marks import Marks
    from dlite.tokens import TokenBytes

FED = 512  # last tokens that a new cursor is given: the longest match that it can know of
BLOCK = 2**32 - 1  # of a label's number
TRACKED = 64  # last tokens of a prompt that may open a block, as a template does


@dataclass(frozen=True, slots=True)
class Origin:
    """A corpus that a call looks into. `marks` are a lane's (PROMPT) or the workspace's."""

    source: SourceClass
    marks: Marks | None


class Call:
    """`live`, `files` and `static` are its sources; `origins` names them in this order."""

    def __init__(
        self,
        request: Request,
        session: Session,
        table: TokenBytes | None,
        history: str,
        corpus: Any = None,
        rules: Sequence[int] = (),
    ) -> None:
        """`history` is one of `memory.HISTORIES`; `rules` are for lanes, files and the corpus."""
        self.request, self.session = request, session
        self.isolated = history == "blocks"  # a lane per agent, query and block
        self.private = history in ("own", "call")  # a lane that ends with the call
        self.tokens: Sequence[int] = request.prompt
        self._logged = len(request.prompt)  # how much of that the lane's log holds
        self._corpus, self._rules = corpus, rules
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
        self.reader = make_reader(self.tracker)
        self.reader.seen = len(request.prompt)
        self.survival: Any = None
        self._taken: dict[Hashable, tuple[Lane, int]] = {}  # and where its own text begins
        if not self.isolated:
            self._read([] if history == "own" else request.prompt)
        self._enter(self.tracker.block if self.tracker else TEXT)

    def _read(self, prompt: list[int]) -> None:
        self.lanes = self.session.lanes(self.request.id if self.private else None)
        self.lane, self.scope, new = self.lanes.read(np.array(prompt, dtype=np.int32))
        agent = self.request.agent
        self._mark(Label(agent.agent_id, agent.query_id, None))
        self.lane.write(new)
        self._taken[None] = (self.lane, self.lane.size)

    # ---- writing ---------------------------------------------------------------------------

    def take(
        self, tokens: Sequence[int], blocks: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Of the tokens so far those that the own index still lacks, and those that are new.

        `blocks`: before each new token and behind the last one, if the tracker has read them."""
        start = self.reader.seen
        new = list(tokens[start:])
        self.reader.seen, self.tokens = len(tokens), tokens
        if self.tracker is None:
            return new, new
        begin = 0
        for index, block in enumerate(blocks or [*self.tracker.feed(new), self.tracker.block]):
            if block != self.reader.block:
                self.lane.index.extend(new[begin:index])
                begin = index
                if self.isolated:
                    self._log(start + index)
                self._enter(block)
        return new[begin:], new

    def turn(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """What the native reader leaves to Python: another block, or other sources."""
        lacking, new = self.take(tokens, blocks)
        if self.version != self.session.version:
            self.connect()
            new = []
        self.reader.own, self.reader.seen = len(tokens) - len(lacking), len(tokens) - len(new)

    def _log(self, end: int) -> None:
        self.lane.log.append(self.tokens[self._logged : end])
        self._logged = end

    def _mark(self, label: Label) -> int:
        number = self.session.label(label)
        self.lane.marks.mark(self.lane.size, number)
        return number

    def _enter(self, block: int) -> None:
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
        self.reader.block, self.reader.label = block, self._mark(label)

    def seal(self) -> None:
        """The call has ended as it should: its text is its session's."""
        lacking, _ = self.take(self.tokens)
        self.lane.index.extend(lacking)
        self._log(len(self.tokens))
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

    def learn(self, survival: Any) -> None:
        """What the session's verdicts taught, for the choice among what is found."""
        self.survival = survival
        if self._rules:
            self.reader.learn(survival)

    # ---- looking ---------------------------------------------------------------------------

    def connect(self) -> None:
        """Follows, from the newest token on, all that there is now to look into."""
        self.version = self.session.version
        beside = self.lanes.beside(self.lane)
        self.live = [self.lane.index, *(self._follow(lane.index) for lane in beside)]
        self.origins = [Origin(SourceClass.PROMPT, lane.marks) for lane in (self.lane, *beside)]
        sources, files = [*self.live], self.session.workspace
        self.files = self.static = None
        if files and files.index is not None:
            self.files = self._follow(files.index)
            self.origins.append(Origin(SourceClass.WORKSPACE, files.marks))
            sources.append(self.files)
        if self._corpus is not None:
            self.static = self._follow(self._corpus)
            self.origins.append(Origin(SourceClass.GLOBAL, None))
            sources.append(self.static)
        if self._rules:
            found = zip(sources, self.origins, strict=True)
            self.reader.connect(
                [(source, origin.marks, origin.source) for source, origin in found],
                self._rules,
                files.names if files else [],
            )

    def _follow(self, corpus: Any) -> Source:
        cursor = corpus.cursor()
        cursor.extend(list(self.tokens[-FED:]))
        return cursor

    def source_class(self, origin: Origin, found: Continuation) -> SourceClass:
        if origin.source is not SourceClass.PROMPT or found.start < 0:
            return origin.source
        assert origin.marks is not None
        written, label = origin.marks.at(found.start), self.reader.label
        if written & BLOCK == 0:
            return SourceClass.PROMPT
        if written == label:
            return SourceClass.SAME_BLOCK
        same = written & BLOCK == label & BLOCK
        return SourceClass.OTHER_QUERY if same else SourceClass.OTHER_BLOCK


def _block_names(structure: Structure) -> dict[int, Hashable]:
    """A group's number means nothing in another request's structure; its delimiters do."""
    groups = {pair.group for pair in structure.pairs}
    return {
        group: tuple(sorted(pair.open for pair in structure.pairs if pair.group == group))
        for group in groups
    }
