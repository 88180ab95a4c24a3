"""AgentSpec: drafts from what the same agent wrote for the same query in the same kind of block.

The evidence of a draft holds n (`support`), c (`votes`) and the length of the most frequent prefix
(`agreed`): `dlite.budget` turns them into redundancies and shares of the batch's budget. Without a
budget a draft is as long as its match.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from dlite.drafters.copying import CopyOptions
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.types import Draft, Request, SessionKey, Verdict, View

MODES = ("strict", "class")
VARIANTS = ("full", "S", "R", "N")


@dataclass(kw_only=True)
class AgentSpecOptions(CopyOptions):
    """`variant`, of the paper's Table 6: isolation with a budget (full) or without (S: the same
    drafts), a budget without isolation (R), no structure (N: one block, generated text only).

    `mode` strict drafts from the block alone, as the paper does. `class` searches the whole
    session as well and takes the longer match, the block's on a tie."""

    history: str = "blocks"
    live_rule: str = "majority"
    mode: str = "strict"
    variant: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history != "blocks":
            raise ValueError(
                f"history is {self.history!r}; leave it out: mode and variant choose it"
            )
        for name, known in (("mode", MODES), ("variant", VARIANTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {', '.join(known)}")

    def searched(self) -> list[MemoryOptions]:
        """Of one memory per history that is searched, the preferred one first."""
        session = copy(self)
        session.history = "session"
        if self.variant == "R":
            return [session]
        return [self] if self.mode == "strict" else [self, session]


class AgentSpecDrafter:
    """`memories`: one for each of `options.searched()`."""

    name = "agentspec"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, memories: list[Memory], options: AgentSpecOptions) -> None:
        self.memories, self.options = memories, options

    def start(self, request: Request) -> None:
        for memory in self.memories:
            memory.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        found = [memory.propose(views, nothing=self.name) for memory in self.memories]
        best = [max(drafts, key=_match_length) for drafts in zip(*found, strict=True)]
        return [self.options.cut(draft) for draft in best]

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        for memory in self.memories:
            memory.finish(request)

    def abort(self, request: Request) -> None:
        for memory in self.memories:
            memory.abort(request)

    def close(self, session: SessionKey) -> None:
        for memory in self.memories:
            memory.close(session)


def _match_length(draft: Draft) -> int:
    return draft.evidence.match_length if draft.evidence is not None else 0
