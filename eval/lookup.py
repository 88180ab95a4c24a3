"""Prompt-lookup decoding as its first implementation searches: the first occurrence wins."""

from __future__ import annotations

from collections.abc import Sequence

from dlite.types import Draft, Request, SessionKey, Verdict, View


class PromptLookup:
    """What followed the first occurrence of the last n tokens, the largest n that has one."""

    name = "pld"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, num_draft: int = 10, min_n: int = 3, max_n: int = 5) -> None:
        self.num_draft, self.sizes = num_draft, range(max_n, min_n - 1, -1)
        self._indexes: dict[tuple[SessionKey | None, str], _Grams] = {}

    def start(self, request: Request) -> None:
        """The index of an earlier prompt serves a prompt that goes on from it."""
        key = request.session, request.agent.query_id
        grams = self._indexes.get(key)
        if grams is None or request.prompt[: len(grams.tokens)] != grams.tokens:
            self._indexes[key] = _Grams(self.sizes)

    def propose(self, views: list[View]) -> list[Draft]:
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        grams = self._indexes[view.request.session, view.request.agent.query_id]
        grams.extend(view.tokens)
        tokens = view.tokens
        for n in self.sizes:
            end = grams.ends.get(tuple(tokens[-n:]))
            if end is not None and end < len(tokens):
                return Draft(list(tokens[end : end + min(self.num_draft, view.max_draft)]))
        return Draft()

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        pass

    def abort(self, request: Request) -> None:
        pass

    def close(self, session: SessionKey) -> None:
        self._indexes = {key: found for key, found in self._indexes.items() if key[0] != session}


class _Grams:
    """The first end of every n-gram of a text."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens += tokens[start:]
        for end in range(start + 1, len(tokens) + 1):
            for n in self.sizes:
                if n <= end:
                    self.ends.setdefault(tuple(tokens[end - n : end]), end)
