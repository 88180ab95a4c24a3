"""Plain retrieval drafters, as small as they can be: what the larger ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from dlite.retrieval import Automaton, Rule
from dlite.types import Draft, Request, SessionKey, Verdict, View


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two lists share, by bisection."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


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


class AutomatonDrafter:
    """As many tokens as the longest match is long, the most recent occurrence unless `rule` says
    otherwise, from an automaton of the call's own text (without its prompt where `prompt` is
    false)."""

    name = "call"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, *, rule: Rule = Rule.RECENT, prompt: bool = True) -> None:
        self.rule, self.prompt = rule, prompt
        self._indexes: dict[str, Automaton] = {}
        self._sizes: dict[str, int] = {}  # tokens taken so far

    def start(self, request: Request) -> None:
        index = self._indexes[request.id] = Automaton()
        index.extend(request.prompt if self.prompt else [])
        self._sizes[request.id] = len(request.prompt)

    def propose(self, views: list[View]) -> list[Draft]:
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        index, size = self._indexes[view.request.id], self._sizes[view.request.id]
        index.extend(view.tokens[size:])
        self._sizes[view.request.id] = len(view.tokens)
        found = index.find(self.rule, view.max_draft)
        return Draft(found.tokens[: found.match_length])

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._indexes.pop(request.id).close()
        del self._sizes[request.id]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass


class SessionAutomaton(AutomatonDrafter):
    """One automaton of all that a session's calls read and wrote, each message once. A prompt that
    goes on from the last indexed text continues it; what is new in any other is a segment."""

    name = "session"

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[SessionKey | None, _Indexed] = {}

    def start(self, request: Request) -> None:
        indexed = self._sessions.setdefault(request.session, _Indexed())
        before = indexed.scopes.get(request.agent.query_id, [])
        known = common_prefix(before, request.prompt)
        if known < len(before) or before is not indexed.last:
            indexed.automaton.end_segment()
        indexed.automaton.extend(request.prompt[known:])
        indexed.last = indexed.scopes[request.agent.query_id] = list(request.prompt)
        self._indexes[request.id] = indexed.automaton
        self._sizes[request.id] = len(request.prompt)

    def _propose(self, view: View) -> Draft:
        indexed = self._sessions[view.request.session]
        indexed.last += view.tokens[len(indexed.last) :]
        return super()._propose(view)

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        indexed = self._sessions[request.session]
        indexed.last += [*draft.tokens[: verdict.num_accepted], verdict.next_token]

    def finish(self, request: Request) -> None:
        """Takes the last round's tokens; the automaton stays."""
        indexed, size = self._sessions[request.session], self._sizes.pop(request.id)
        del indexed.last[len(request.prompt) + request.max_new_tokens :]  # behind a full draft
        self._indexes.pop(request.id).extend(indexed.last[size:])

    def close(self, session: SessionKey) -> None:
        self._sessions.pop(session).automaton.close()


class _Indexed:
    def __init__(self) -> None:
        self.automaton = Automaton()
        self.scopes: dict[str, list[int]] = {}  # the text indexed of each scope
        self.last: list[int] = []  # the scope's that is at the automaton's end
