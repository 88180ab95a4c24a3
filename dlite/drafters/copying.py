"""Copies the longest match that a memory holds: `sam` over a suffix automaton of the call's own
text (as SAM-Decoding does), `suffix` over Arctic Inference's suffix tree, by its own rules."""

from __future__ import annotations

from dataclasses import dataclass

from dlite.drafters.memory import Memory, MemoryOptions
from dlite.types import Draft, Request, SessionKey, Verdict, View

LENGTHS = ("match", "agreed", "all")


@dataclass(kw_only=True)
class CopyOptions(MemoryOptions):
    """`length`: as many tokens as the match is long; as most of its occurrences agree on (rule
    `majority`); or all that there are, for a budget to cut. `num_draft` bounds it (0: no more
    than the view does)."""

    history: str = "call"
    workspace: bool = False
    length: str = "match"
    num_draft: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length not in LENGTHS:
            raise ValueError(f"length is {self.length!r}; choose {', '.join(LENGTHS)}")
        if self.num_draft < 0:
            raise ValueError(f"num_draft is {self.num_draft}; give at least 0 (0: no bound)")

    def cut(self, draft: Draft) -> Draft:
        length, evidence = len(draft.tokens), draft.evidence
        if self.length != "all" and evidence is not None:
            length = evidence.match_length if self.length == "match" else evidence.agreed
        del draft.tokens[min(length, self.num_draft) if self.num_draft else length :]
        return draft


@dataclass(kw_only=True)
class SuffixOptions(CopyOptions):
    """The tree stops by itself: K = m, and where its path's probability falls under 0.1."""

    engine: str = "arctic"
    length: str = "all"


class CopyDrafter:
    tap_ids: tuple[int, ...] = ()

    def __init__(self, name: str, memory: Memory, options: CopyOptions) -> None:
        self.name, self.memory, self.options = name, memory, options

    def start(self, request: Request) -> None:
        self.memory.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = self.memory.propose(views, nothing=self.name)
        return [self.options.cut(draft) for draft in drafts]

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.memory.observe(request, draft, verdict)

    def finish(self, request: Request) -> None:
        self.memory.finish(request)

    def abort(self, request: Request) -> None:
        self.memory.abort(request)

    def close(self, session: SessionKey) -> None:
        self.memory.close(session)
