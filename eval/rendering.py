"""Sessions as model calls in a target's tokens: prompt by its chat template, and the output.

Prompts repeat what came before. Each text between two special tokens is tokenised once, and a
prompt is a row of such pieces; a folder keeps them for the next run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlite.loading import load_tokenizer
from dlite.types import OpenedFile
from eval.traces import Message, Session

FORMAT = 2  # of the cached files


@dataclass(slots=True)
class Call:
    """One model call of a session. `output` ends with the end-of-turn token."""

    id: str
    session: str
    task: str
    group: str
    agent: str
    scope: str
    turn: int
    edits: bool
    files: tuple[OpenedFile, ...]
    pieces: list[list[int]]
    output: list[int]

    def prompt(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


class Renderer:
    """Chat template and tokenizer of a target, by its name, folder or hub id.

    Raises ValueError where there is no chat template or no end-of-turn token.
    """

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        if self.tokenizer.chat_template is None or self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {tokenizer!r} lacks a chat template or an end token; name a chat model"
            )
        self.end_id: int = self.tokenizer.eos_token_id
        self._backend = self.tokenizer.backend_tokenizer
        added = [t.content for t in self._backend.get_added_tokens_decoder().values()]
        special = sorted(added, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, special)) + ")")
        self._ids: dict[str, int] = {}
        self.pieces: list[list[int]] = []

    def fingerprint(self) -> str:
        text = self._backend.to_str() + self.tokenizer.chat_template
        return hashlib.sha256(text.encode()).hexdigest()

    def piece_ids(self, text: str) -> list[int]:
        """Numbers of the pieces whose tokens, put together, are the text's."""
        return [self._piece(part) for part in self._special.split(text) if part]

    def _piece(self, part: str) -> int:
        known = self._ids.get(part)
        if known is None:
            known = self._ids[part] = len(self.pieces)
            self.pieces.append(self._backend.encode(part, add_special_tokens=False).ids)
        return known

    def prompt_pieces(self, messages: Sequence[Message]) -> list[int]:
        chat = [{"role": m.role, "content": m.text} for m in messages]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.piece_ids(text)


@dataclass(slots=True)
class _Row:
    """A call as it is cached."""

    session: str
    task: str
    group: str
    agent: str
    scope: str
    turn: int
    edits: bool
    files: list[tuple[str, str]]
    prompt: list[int]
    output: list[int]


def _rows(session: Session, renderer: Renderer) -> Iterator[_Row]:
    """A call's prompt: what came before it in its scope, without what only earlier ones read."""
    scopes: dict[str, list[Message]] = {}
    files: list[OpenedFile] = []
    for message in session.messages:
        scope = scopes.setdefault(message.scope, [])
        if message.generated and scope:
            read = [m for m in scope if not (m.transient and m.turn < message.turn)]
            yield _Row(
                session=session.id,
                task=session.task,
                group=session.group,
                agent=message.agent,
                scope=message.scope,
                turn=message.turn,
                edits=message.edits,
                files=[(file.path, file.text) for file in files],
                prompt=renderer.prompt_pieces(read),
                output=renderer.piece_ids(message.text),
            )
            files = []
        scope.append(message)
        files += message.files


def _call(row: _Row, pieces: list[list[int]], end_id: int) -> Call:
    output = [token for piece in row.output for token in pieces[piece]]
    return Call(
        id=f"{row.session}#{row.turn}",
        session=row.session,
        task=row.task,
        group=row.group,
        agent=row.agent,
        scope=row.scope,
        turn=row.turn,
        edits=row.edits,
        files=tuple(OpenedFile(path, text) for path, text in row.files),
        pieces=[pieces[piece] for piece in row.prompt],
        output=[*output, end_id],
    )


def is_one_stream(calls: Sequence[Call]) -> bool:
    """Whether each prompt of a session begins with all that was read and written before it: what
    a call looks back on is then its session."""
    before: list[int] = []
    for call in calls:
        prompt = call.prompt()
        if prompt[: len(before)] != before:
            return False
        before = prompt + call.output
    return True


@dataclass(frozen=True, slots=True)
class Workload:
    """`sessions` are each session's calls in order."""

    sessions: list[list[Call]]
    tokenizer: Any
    end_id: int
    sha256: str  # of the sessions and the tokenizer


def load_calls(sessions: Sequence[Session], tokenizer: str, cache: Path | None = None) -> Workload:
    """`cache`: where tokenised sessions are kept; None is the user's cache folder.

    Raises ValueError where no session has a model call.
    """
    renderer = Renderer(tokenizer)
    digest = hashlib.sha256(f"{FORMAT}{renderer.fingerprint()}".encode())
    for session in sessions:
        digest.update(repr(session).encode())
    sha256 = digest.hexdigest()
    folder = (cache or default_cache()) / sha256[:32]
    if not (folder / "rows.json").is_file():
        _write(folder, sessions, renderer)
    rows, pieces = _load(folder)
    calls: dict[str, list[Call]] = {}
    for row in rows:
        calls.setdefault(row.session, []).append(_call(row, pieces, renderer.end_id))
    if not calls:
        raise ValueError("no session holds a message that a model generated; give other sessions")
    return Workload(list(calls.values()), renderer.tokenizer, renderer.end_id, sha256)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dlite" / "sessions"


def _write(folder: Path, sessions: Sequence[Session], renderer: Renderer) -> None:
    rows = [
        asdict(row)
        for session in tqdm(sessions, "tokenising", disable=None)
        for row in _rows(session, renderer)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    sizes = np.array([len(piece) for piece in renderer.pieces], np.int64)
    tokens = np.array([t for piece in renderer.pieces for t in piece], np.int32)
    np.savez(folder / "pieces.npz", tokens=tokens, ends=sizes.cumsum())
    partial = folder / "rows.partial"
    partial.write_text(json.dumps(rows))
    os.replace(partial, folder / "rows.json")


def _load(folder: Path) -> tuple[list[_Row], list[list[int]]]:
    stored = np.load(folder / "pieces.npz")
    tokens: list[int] = stored["tokens"].tolist()
    ends: list[int] = stored["ends"].tolist()
    pieces = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return [_Row(**row) for row in rows], pieces
