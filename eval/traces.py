"""Recorded agent sessions: the project's own schema, OpenAI-style messages, SWE-agent's `.traj`.

`docs/sessions.md` says what a session file holds and how to write one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlite.types import OpenedFile

SCHEMA = "agtraj/1"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """`generated` messages are what a model call put out; `text` is then all of it, tool calls
    included. `turn` numbers the call that read (or wrote) the message; `transient` messages are
    read by that call alone. `edits` says that the call edits a file."""

    role: str
    text: str
    turn: int
    generated: bool
    agent: str = ""
    scope: str = ""
    transient: bool = False
    files: tuple[OpenedFile, ...] = ()
    edits: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """`group` names the scaffold in tables; sessions of one `task` may share their answers."""

    id: str
    task: str
    group: str
    model: str
    split: str
    messages: list[Message]


def read_sessions(names: Iterable[str], split: str | None = None, limit: int = 0) -> list[Session]:
    """Sessions of files (JSON lines, gzipped or not; .traj) and of folders of such files, at most
    `limit` (0: all) of those in `split` (None: all).

    Raises ValueError for a broken file, a repeated session id, and where no session is left.
    """
    sessions: dict[str, Session] = {}
    splits = set()
    for path in _files(names):
        for session in tqdm(_read(path), f"reading {path.name}", disable=None):
            splits.add(session.split)
            if split is not None and session.split != split:
                continue
            if session.id in sessions:
                raise ValueError(f"{path}: session {session.id!r} occurs twice; make ids unique")
            sessions[session.id] = session
    if not sessions:
        known = ", ".join(sorted(splits)) or "none"
        raise ValueError(f"no session with split {split!r} in {', '.join(names)}; it has {known}")
    return list(sessions.values())[: limit or None]


def _files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".gz", ".traj"))
        else:
            found = [path] if path.is_file() else []
        if not found:
            raise ValueError(f"no session file {name}; give a .jsonl, .jsonl.gz or .traj file")
        yield from found


def _read(path: Path) -> Iterator[Session]:
    """The sessions of one file, in order."""
    try:
        if path.suffix == ".traj":
            yield _session(json.loads(path.read_text(encoding="utf-8")), path.stem)
            return
        opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            stem = path.name.partition(".")[0]
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _session(json.loads(line), f"{stem}-{number}")
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise ValueError(f"{path} is no session file ({error!r}); see docs/sessions.md") from None


def _session(row: dict[str, Any], name: str) -> Session:
    """`name` is the session's where the row has none."""
    if row.get("schema") == SCHEMA:
        return _agtraj(row)
    if "schema" in row:
        raise ValueError(f"schema is {row['schema']!r}, not {SCHEMA!r}")
    if "history" in row or "trajectory" in row:
        return _swe_agent(row, name)
    return _openai(row, name)


def _agtraj(row: dict[str, Any]) -> Session:
    messages = [
        Message(
            role=m["role"],
            text=emitted(m["text"], m.get("tool_calls") or ()),
            turn=m["turn"],
            generated=m["kind"] == "generated",
            agent=m["agent"],
            scope=m["scope"],
            transient=bool(m.get("transient")),
            files=tuple(
                OpenedFile(o["path"], m["text"][slice(*o["span"])]) for o in m.get("opened") or ()
            ),
            edits=bool(m.get("edits")),
        )
        for m in row["messages"]
    ]
    group, slash, _ = row["session_id"].partition("/")
    return Session(
        id=row["session_id"],
        task=row.get("task_id", row["session_id"]),
        group=group if slash else row["scaffold"],
        model=row["model"],
        split=row["split"],
        messages=messages,
    )


def _openai(row: dict[str, Any], name: str) -> Session:
    """`{"messages": [...]}`: each assistant message is a call that read all before it."""
    session_id = str(row.get("session_id", row.get("id", name)))
    return Session(
        id=session_id,
        task=str(row.get("task_id", session_id)),
        group=str(row.get("scaffold", "messages")),
        model=str(row.get("model", "")),
        split=str(row.get("split", "")),
        messages=_numbered(row["messages"], str(row.get("agent", ""))),
    )


def _swe_agent(row: dict[str, Any], name: str) -> Session:
    """`history` is what was sent; without it, the steps of `trajectory`. Demonstrations are
    prompt."""
    if "history" in row:
        messages = row["history"]
    else:
        messages = [
            message
            for step in row["trajectory"]
            for message in (
                {"role": "assistant", "content": step["response"]},
                {"role": "user", "content": step["observation"] or ""},
            )
        ]
    return Session(name, name, "swe-agent", "", "", _numbered(messages, ""))


def _numbered(rows: Iterable[dict[str, Any]], agent: str) -> list[Message]:
    messages, turn = [], 1
    for row in rows:
        role = row["role"]
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")
        tool_calls = [call["function"] for call in row.get("tool_calls") or ()]
        text = emitted(_text(row.get("content")), tool_calls)
        generated = role == "assistant" and not row.get("is_demo")
        messages.append(Message(role, text, turn, generated, str(row.get("agent", agent))))
        turn += generated
    return messages


def _text(content: Any) -> str:
    """Message content: text, None, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def emitted(text: str, tool_calls: Iterable[dict[str, Any]]) -> str:
    """A message as the model emits it: its text, then each tool call in the format of Hermes and
    Qwen. `arguments` are JSON text, or what that would hold."""
    parts = [text] if text else []
    for call in tool_calls:
        arguments = call["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(call["name"], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)
