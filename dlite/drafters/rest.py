"""REST (He et al. 2024): drafts from a static datastore only, the longest match of the last tokens.

The original offers a tree of the most frequent continuations to a verifier with tree attention;
of it, this drafts the one path that most occurrences agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlite.drafters.call import FED
from dlite.retrieval import Rule, step
from dlite.retrieval.base import Source
from dlite.types import Draft, Evidence, Request, SessionKey, SourceClass, Verdict, View


@dataclass(kw_only=True)
class RestOptions:
    """`corpus` is the datastore's folder; see `dlite corpus build`. `num_draft` 10 is the
    original's length of a continuation."""

    corpus: str
    num_draft: int = 10

    def __post_init__(self) -> None:
        if self.num_draft < 1:
            raise ValueError(f"num_draft is {self.num_draft}; give at least 1")


class RestDrafter:
    name = "rest"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, corpus: Any, options: RestOptions) -> None:
        self.corpus, self.options = corpus, options
        self._cursors: dict[str, Source] = {}
        self._taken: dict[str, int] = {}

    def start(self, request: Request) -> None:
        self._cursors[request.id] = self.corpus.cursor()
        self._taken[request.id] = max(0, len(request.prompt) - FED)

    def propose(self, views: list[View]) -> list[Draft]:
        cursors, new = [], []
        for view in views:
            name = view.request.id
            cursors.append(self._cursors[name])
            new.append(list(view.tokens[self._taken[name] :]))
            self._taken[name] = len(view.tokens)
        drafts = []
        for view, found in zip(
            views, step(cursors, new, Rule.MAJORITY, self.options.num_draft), strict=True
        ):
            evidence = Evidence(
                *(SourceClass.GLOBAL, found.match_length, found.support, found.votes, found.agreed)
            )
            drafts.append(Draft(found.tokens[: view.max_draft], source="rest", evidence=evidence))
        return drafts

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        del self._cursors[request.id], self._taken[request.id]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
