"""The pushdown automaton over bytes behind the block tracker: one byte at a time.

Delimiters match leftmost, then longest; one that may still grow (`$` into `$$`) stays pending.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from dlite.drafters.structure import MAX_DEPTH, Mode, Pair, Structure

CLOSE = -1
MAX_RUN = 255  # longer fences count as this long, which bounds the work per byte
MAX_INFO_BYTES = 64
NEWLINE, SPACE, QUOTE, BACKSLASH, BACKTICK = b'\n "\\`'


class Line(IntEnum):
    """Where in a fence's line the stream is."""

    ELSEWHERE = 0
    RUN = 1  # in the run of ``` that may open or close a block
    INFO = 2  # behind a run that opens one, if this line has no backtick
    TAIL = 3  # behind a run that closes one, if nothing but blanks follows


@dataclass(frozen=True, slots=True)
class Matcher:
    texts: dict[bytes, int]  # delimiter -> pair that it opens, or CLOSE
    prefixes: frozenset[bytes]  # what may still become a delimiter

    @classmethod
    def of(cls, texts: dict[bytes, int]) -> Matcher:
        prefixes = (text[:size] for text in texts for size in range(1, len(text)))
        return cls(texts, frozenset(prefixes))


NO_MATCH = Matcher.of({})


@dataclass(frozen=True, slots=True)
class Scope:
    """What can happen on top of one block: its end, and the blocks that open inside."""

    delimiters: Matcher
    unescaped: Matcher  # those that a backslash before them doesn't hide
    fences: list[int]  # pairs
    fence_bytes: frozenset[int]


@dataclass(slots=True)
class State:
    """All that the past leaves behind."""

    stack: list[tuple[int, int]] = field(default_factory=list)  # pair, length of its fence
    pending: bytes = b""  # the start of a delimiter, perhaps
    hidden: bool = False  # an odd run of backslashes stands before `pending`
    indent: int = 0  # spaces since the start of the line; -1: something else, or more than 3
    in_string: bool = False
    escaped: bool = False  # in the string
    line: Line = Line.ELSEWHERE
    fence_byte: int = 0
    run: int = 0
    info: bytes = b""


def triggers(structure: Structure) -> frozenset[int]:
    starts = {text[0] for pair in structure.pairs for text in (pair.open, pair.close)}
    return frozenset(starts | {NEWLINE, QUOTE, BACKSLASH})


def scope_of(structure: Structure, place: int) -> Scope:
    pairs = structure.pairs
    inner = structure.top if place < 0 else pairs[place].inner
    opens = [(pairs[p].open, p, pairs[p].mode) for p in inner]
    fences = [p for _, p, mode in opens if mode is Mode.FENCE]
    entries = [entry for entry in opens if entry[2] is not Mode.FENCE]
    if place >= 0 and pairs[place].mode is not Mode.FENCE:
        close = pairs[place].close
        entries = [entry for entry in entries if entry[0] != close]
        entries.append((close, CLOSE, pairs[place].mode))
    fence_bytes = {pairs[p].open[0] for p in fences}
    if place >= 0 and pairs[place].mode is Mode.FENCE:
        fence_bytes.add(pairs[place].open[0])
    return Scope(
        delimiters=Matcher.of({text: action for text, action, _ in entries}),
        unescaped=Matcher.of({t: action for t, action, mode in entries if mode is not Mode.ESCAPE}),
        fences=fences,
        fence_bytes=frozenset(fence_bytes),
    )


class Machine:
    def __init__(self, pairs: tuple[Pair, ...], scopes: list[Scope], state: State) -> None:
        self.pairs, self.scopes, self.state = pairs, scopes, state

    def take(self, byte: int) -> None:
        waiting = [byte]  # last in, first out
        while waiting:
            waiting += reversed(self._step(waiting.pop()))

    def end(self) -> None:
        """Decides what is pending as if nothing followed."""
        state, waiting = self.state, b""
        while waiting or state.line or state.pending:
            if waiting:
                waiting = self._step(waiting[0]) + waiting[1:]
            elif state.line is Line.TAIL or (state.line is Line.RUN and self._run_closes()):
                self._close()
            elif state.line is Line.INFO or (state.line is Line.RUN and self._run_opens()):
                self._open_fence()
            elif state.line is Line.RUN:
                waiting = self._plain_run()
            else:
                waiting = self._decide()

    def _step(self, byte: int) -> bytes:
        """Takes a byte; returns those that have to be taken (again) after it."""
        state = self.state
        if state.line is Line.RUN:
            if byte == state.fence_byte:
                state.run = min(state.run + 1, MAX_RUN)
                return b""
            if self._run_closes():
                state.line = Line.TAIL
            elif self._run_opens():
                state.line = Line.INFO
            else:
                return self._plain_run() + bytes([byte])
        if state.line is Line.TAIL:
            if byte == NEWLINE:
                self._close()
                state.indent = 0
                return b""
            if byte in b" \t\r":
                return b""
            self._leave_line()
        elif state.line is Line.INFO:
            if byte == NEWLINE:
                self._open_fence()
                state.indent = 0
                return b""
            if byte != BACKTICK or state.fence_byte != BACKTICK:
                state.info = (state.info + bytes([byte])).lstrip()[:MAX_INFO_BYTES]
                return b""
            self._leave_line()
        starts_line = not state.pending and state.indent >= 0
        if starts_line and byte in self._scope().fence_bytes and not state.in_string:
            state.line, state.fence_byte, state.run, state.info = Line.RUN, byte, 1, b""
            return b""
        return self._ordinary(byte)

    def _ordinary(self, byte: int) -> bytes:
        state = self.state
        state.pending += bytes([byte])
        return b"" if state.pending in self._matcher().prefixes else self._decide()

    def _decide(self) -> bytes:
        """Consumes a delimiter, or one byte of text; returns the rest of what was pending."""
        state, texts = self.state, self._matcher().texts
        pending, state.pending = state.pending, b""
        for size in range(len(pending), 0, -1):
            if pending[:size] in texts:
                self._act(texts[pending[:size]])
                return pending[size:]
        self._text(pending[0])
        return pending[1:]

    def _matcher(self) -> Matcher:
        if self.state.in_string:
            return NO_MATCH
        return self._scope().unescaped if self.state.hidden else self._scope().delimiters

    def _scope(self) -> Scope:
        return self.scopes[self.state.stack[-1][0] + 1 if self.state.stack else 0]

    def _act(self, action: int) -> None:
        if action == CLOSE:
            self._close()
        else:
            self._open(action, 0)

    def _open(self, pair: int, run: int) -> None:
        if len(self.state.stack) < MAX_DEPTH:
            self.state.stack.append((pair, run))
        self._leave_line()

    def _close(self) -> None:
        self.state.stack.pop()
        self._leave_line()

    def _leave_line(self) -> None:
        state = self.state
        state.line, state.indent, state.hidden = Line.ELSEWHERE, -1, False
        state.in_string = state.escaped = False

    def _text(self, byte: int) -> None:
        state = self.state
        state.hidden = byte == BACKSLASH and not state.hidden
        if byte == NEWLINE:
            state.indent = 0
        else:
            state.indent = state.indent + 1 if byte == SPACE and 0 <= state.indent < 3 else -1
        if state.stack and self.pairs[state.stack[-1][0]].mode is Mode.JSON:
            self._json(byte)

    def _json(self, byte: int) -> None:
        state = self.state
        if not state.in_string:
            state.in_string = byte == QUOTE
        elif state.escaped:
            state.escaped = False
        elif byte == BACKSLASH:
            state.escaped = True
        elif byte in (QUOTE, NEWLINE):  # no string of JSON holds a raw newline: it was malformed
            state.in_string = False

    def _run_closes(self) -> bool:
        stack, state = self.state.stack, self.state
        if not stack or self.pairs[stack[-1][0]].mode is not Mode.FENCE:
            return False
        pair, opened = stack[-1]
        return self.pairs[pair].open[0] == state.fence_byte and state.run >= opened

    def _run_opens(self) -> bool:
        return any(
            self.pairs[p].open[0] == self.state.fence_byte
            and self.state.run >= self.pairs[p].fence_run
            for p in self._scope().fences
        )

    def _open_fence(self) -> None:
        """The pair with the longest text that the line starts with; none: the line is text."""
        state = self.state
        found = [
            (self.pairs[p].fence_run, len(self.pairs[p].fence_info), p)
            for p in self._scope().fences
            if self.pairs[p].open[0] == state.fence_byte
            and state.run >= self.pairs[p].fence_run
            and state.info.startswith(self.pairs[p].fence_info)
        ]
        if found:
            self._open(max(found, key=lambda f: f[1])[2], state.run)
        else:
            self._leave_line()

    def _plain_run(self) -> bytes:
        """It was no fence: its first character goes, the rest may be delimiters of other kinds."""
        state = self.state
        state.line = Line.ELSEWHERE
        return self._ordinary(state.fence_byte) + bytes([state.fence_byte]) * (state.run - 1)
