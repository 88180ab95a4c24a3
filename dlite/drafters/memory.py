"""The memory behind all retrieval drafters: per (tenant, session), and gone with the session.

What a session can be told apart by stays in its `Session`: its text, its files, the acceptance
learnt from it. Sessions share the static corpus and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dlite import retrieval
from dlite.drafters.call import Call
from dlite.drafters.memory_options import ENGINES, RULES, MemoryOptions
from dlite.drafters.reader import NATIVE
from dlite.drafters.session import Session
from dlite.drafters.workspace import Encode, Workspace
from dlite.retrieval import base
from dlite.retrieval.base import Continuation
from dlite.types import Draft, Evidence, Request, SessionKey, SourceClass, Verdict, View

if TYPE_CHECKING:
    from dlite.tokens import TokenBytes


class Seen(NamedTuple):
    """What a call finds in each of its origins."""

    call: Call | None  # None: its session was closed
    found: list[Continuation]


class Memory:
    """Of one drafter, used from one thread. `encode` (text to ids, no special tokens) is needed
    for files, `table` for blocks, `corpus` (anything with `cursor()`) is shared by all sessions.
    """

    def __init__(
        self,
        options: MemoryOptions | None = None,
        *,
        encode: Encode | None = None,
        table: TokenBytes | None = None,
        corpus: Any = None,
        clock: Callable[[], float] = time.monotonic,
        native: bool = True,
    ) -> None:
        self.options = options or MemoryOptions()
        self.corpus = corpus
        self._encode, self._table, self._clock = encode, table, clock
        self._make_index, self._step = ENGINES[self.options.engine]
        self._rules = [
            RULES[name]
            for name in (
                self.options.live_rule,
                self.options.workspace_rule,
                self.options.static_rule,
            )
        ]
        self.native = native and NATIVE and self._step is not base.step and _is_native(corpus)
        self._sessions: dict[Hashable, Session] = {}
        self._calls: dict[str, Call] = {}

    # ---- calls and sessions ----------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Reads the prompt, as far as it is new, and the files that were opened for it."""
        assert request.id not in self._calls, f"{request.id} runs already"
        self.expire()
        options = self.options
        session = self._sessions.get(_key(request))
        if session is None:
            session = self._sessions[_key(request)] = self._new_session()
        session.num_running += 1
        session.open(request.agent.files)
        self._calls[request.id] = Call(
            request,
            session,
            self._table,
            options.history,
            self.corpus,
            self._rules if self.native else (),
        )

    def _new_session(self) -> Session:
        options, files = self.options, None
        if options.workspace and self._encode is not None:
            files = Workspace(
                self._make_index,
                self._encode,
                options.forms,
                options.secret_files,
                options.max_session_tokens,
            )
        return Session(self._make_index, files, options.max_session_tokens)

    def call(self, request: Request) -> Call | None:
        """None when its session was closed while it runs."""
        return self._calls.get(request.id)

    def session(self, request: Request) -> Session | None:
        call = self._calls.get(request.id)
        return call.session if call else None

    @property
    def num_tokens(self) -> int:
        """Indexed, of all sessions."""
        return sum(session.num_tokens for session in self._sessions.values())

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        if draft.source.startswith("workspace:") and (session := self.session(request)):
            form = draft.source.partition(":")[2]
            session.record(form, len(draft.tokens), verdict.num_accepted)

    def finish(self, request: Request) -> None:
        """The call's text becomes its session's."""
        self._end(request, Call.seal)

    def abort(self, request: Request) -> None:
        """What the call generated is forgotten: nobody has seen it whole."""
        self._end(request, Call.drop)

    def _end(self, request: Request, ending: Callable[[Call], None]) -> None:
        call = self._calls.pop(request.id, None)
        if call is None:
            return
        session = call.session
        session.num_running -= 1
        session.used_at = self._clock()
        if request.session is None:
            self._drop(_key(request))
        else:
            ending(call)

    def close(self, session: SessionKey) -> None:
        """Wipes all that is known of it; its running calls go on without drafts."""
        if session in self._sessions:
            self._drop(session)

    def _drop(self, key: Hashable) -> None:
        session = self._sessions.pop(key)
        for name in [n for n, call in self._calls.items() if call.session is session]:
            del self._calls[name]
        session.close()

    def expire(self) -> None:
        """Closes sessions that have been idle too long, and the idlest while there is too much."""
        now = self._clock()
        idle = [
            (session.used_at, key)
            for key, session in self._sessions.items()
            if session.num_running == 0
        ]
        idle.sort(key=lambda pair: pair[0])
        total = self.num_tokens
        for used_at, key in idle:
            too_old = now - used_at > self.options.idle_seconds
            if not too_old and total <= self.options.max_tokens:
                break
            total -= self._sessions[key].num_tokens
            self._drop(key)

    # ---- looking ---------------------------------------------------------------------------

    def look(self, views: Sequence[View]) -> list[Seen]:
        """What follows the last tokens of each view in each of its origins; a call per rule."""
        calls = [self._calls.get(view.request.id) for view in views]
        live, files, static = ([], []), ([], []), ([], [])  # sources and their new tokens
        for view, call in zip(views, calls, strict=True):
            if call is None:
                continue
            lacking, new = call.take(view.tokens)
            if call.version != call.session.version:
                call.connect()
                new = []
            live[0].extend(call.live)
            live[1].append(lacking)
            live[1].extend([new] * (len(call.live) - 1))
            if call.files is not None:
                files[0].append(call.files)
                files[1].append(new)
            if call.static is not None:
                static[0].append(call.static)
                static[1].append(new)
        longest = max((view.max_draft for view in views), default=0)
        answers = [
            iter(self._step(sources, tokens, rule, longest) if sources else ())
            for (sources, tokens), rule in zip((live, files, static), self._rules, strict=True)
        ]
        return [Seen(call, _collect(call, answers) if call else []) for call in calls]

    def propose(
        self,
        views: list[View],
        *,
        delta: int = 0,
        nothing: str = "none",
    ) -> list[Draft]:
        """Of each view's origins the longest match, the earlier one on a tie, a static one only if
        it is longer by more than `delta`; as long as the view allows. `nothing` names the source of
        an empty draft."""
        if self.native:
            return self.native_drafts(views, delta, 0.0, nothing)
        drafts = []
        for view, seen in zip(views, self.look(views), strict=True):
            place = _longest(seen, delta)
            if seen.call is None or place < 0:
                drafts.append(Draft(source=nothing))
            else:
                drafts.append(self.draft(seen.call, place, seen.found[place], view.max_draft))
        return drafts

    def native_drafts(
        self, views: list[View], delta: int, threshold: float, nothing: str, *within: Any
    ) -> list[Draft]:
        """As `propose`; with `delta` < 0 as the survival drafter chooses, for calls whose reader
        has a `survival`. `within`: step times and a guard to plan by (`dlite.slots.plan`)."""
        from dlite.retrieval import _native

        calls = [self._calls.get(view.request.id) for view in views]
        return _native.propose(calls, views, delta, threshold, nothing, *within)

    def candidates(self, view: View) -> list[Draft]:
        """A draft for each origin that holds a match, as long as the view allows."""
        (seen,) = self.look([view])
        return self.drafts(view, seen)

    def drafts(self, view: View, seen: Seen) -> list[Draft]:
        if seen.call is None:
            return []
        return [
            self.draft(seen.call, place, found, view.max_draft)
            for place, found in enumerate(seen.found)
            if found.match_length > 0
        ]

    def draft(self, call: Call, place: int, found: Continuation, num_tokens: int) -> Draft:
        """`place`: of the origin among the call's."""
        origin = call.origins[place]
        source = call.source_class(origin, found)
        evidence = Evidence(source, found.match_length, found.support, found.votes, found.agreed)
        if origin.source is SourceClass.PROMPT:
            name = "session"
        elif origin.source is SourceClass.GLOBAL:
            name = "global"
        else:
            assert call.session.workspace is not None
            name = call.session.workspace.name_at(found.start)
        return Draft(found.tokens[:num_tokens], source=name, evidence=evidence)


def _key(request: Request) -> Hashable:
    """A call without a session is a session of its own, which no other can name."""
    return request.session if request.session is not None else ("call", request.id)


def _is_native(corpus: Any) -> bool:
    return corpus is None or type(corpus.cursor()).__module__ == retrieval.step.__module__


def _longest(seen: Seen, delta: int) -> int:
    """-1: nothing matches."""
    best, longest = -1, 0
    for place, found in enumerate(seen.found):
        assert seen.call is not None
        static = seen.call.origins[place].source is SourceClass.GLOBAL
        if found.match_length > longest + (delta if best >= 0 and static else 0):
            best, longest = place, found.match_length
    return best


def _collect(call: Call, answers: list[Any]) -> list[Continuation]:
    live, files, static = answers
    found = [next(live) for _ in call.live]
    if call.files is not None:
        found.append(next(files))
    if call.static is not None:
        found.append(next(static))
    return found
