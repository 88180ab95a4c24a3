"""Prompt-lookup decoding (Saxena 2023): what followed the same n-gram before may follow again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlite.types import Draft, Request, SessionKey, Verdict, View


@dataclass(kw_only=True)
class NgramOptions:
    """`max_n` 3 is the default of the method's first implementation; `min_n` 1 drafts most
    often."""

    max_n: int = 3
    min_n: int = 1


class NgramDrafter:
    """Copies what followed the most recent earlier occurrence of the longest suffix n-gram.

    Each request keeps the latest end of every n-gram that a token follows, so a round costs as
    much as the tokens that are new, whatever the context's length.
    """

    name = "ngram"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, *, max_n: int = 3, min_n: int = 1) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram sizes {min_n} to {max_n}; give 1 <= min_n <= max_n")
        self.max_n, self.min_n = max_n, min_n
        self._ends: dict[str, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[str, int] = {}

    def start(self, request: Request) -> None:
        self._ends[request.id] = {}
        self._indexed[request.id] = 0

    def propose(self, views: list[View]) -> list[Draft]:
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        tokens, ends = view.tokens, self._ends[view.request.id]
        for end in range(self._indexed[view.request.id] + 1, len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self._indexed[view.request.id] = len(tokens) - 1
        for n in range(min(self.max_n, len(tokens)), self.min_n - 1, -1):
            end = ends.get(tuple(tokens[len(tokens) - n :]))
            if end is not None:
                found: Sequence[int] = tokens[end : end + view.max_draft]
                return Draft(list(found), source=f"ngram{n}")
        return Draft(source="ngram0")

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        del self._ends[request.id], self._indexed[request.id]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
