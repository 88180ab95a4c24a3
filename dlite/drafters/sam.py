"""A suffix automaton over the call's own prompt and output, as many tokens as match."""

from __future__ import annotations

from dataclasses import dataclass

from dlite.drafters.memory import RULES
from dlite.retrieval import Automaton, step
from dlite.types import Draft, Evidence, Request, SessionKey, SourceClass, Verdict, View


@dataclass(frozen=True, kw_only=True)
class SamOptions:
    """`rule`: which occurrence is copied. `num_draft` 0: as many tokens as the match is long
    (on replayed sessions better than any one number over all batch sizes)."""

    rule: str = "recent"
    num_draft: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; choose {', '.join(RULES)}")
        if self.num_draft < 0:
            raise ValueError(f"num_draft is {self.num_draft}; give at least 0 (0: the match's)")


class SamDrafter:
    name = "sam"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, options: SamOptions | None = None) -> None:
        self.options = options or SamOptions()
        self._indexes: dict[str, Automaton] = {}
        self._indexed: dict[str, int] = {}

    def start(self, request: Request) -> None:
        self._indexes[request.id] = Automaton()
        self._indexed[request.id] = 0

    def propose(self, views: list[View]) -> list[Draft]:
        indexes, new = [], []
        for view in views:
            name = view.request.id
            indexes.append(self._indexes[name])
            new.append(list(view.tokens[self._indexed[name] :]))
            self._indexed[name] = len(view.tokens)
        longest = max((view.max_draft for view in views), default=0)
        found = step(indexes, new, RULES[self.options.rule], longest)
        drafts = []
        for view, one in zip(views, found, strict=True):
            num_draft = min(self.options.num_draft or one.match_length, view.max_draft)
            evidence = Evidence(SourceClass.PROMPT, one.match_length, one.support, one.votes)
            drafts.append(Draft(one.tokens[:num_draft], source="call", evidence=evidence))
        return drafts

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._indexes.pop(request.id).close()
        del self._indexed[request.id]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
