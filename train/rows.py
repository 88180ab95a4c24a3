"""Rows of a chat data set, from JSONL files or the hub, in one form: messages with known roles."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from train.presets import PRESETS

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
ID_KEYS = ("id", "question_id")


class Rejected(Exception):
    """A row that cannot be used. The text is the reason that rejected rows are counted by."""


@dataclass(slots=True)
class Chat:
    """A conversation as chat templates take it, and the tools that its template is given."""

    messages: list[dict[str, Any]]
    tools: list[Any] = field(default_factory=list)

    def kwargs(self, template_kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the chat template is called with besides the messages."""
        return {**template_kwargs, "tools": self.tools} if self.tools else template_kwargs


def read_rows(
    sources: str | Path | Sequence[str | Path], rejected: Counter[str], *, split: str = "train"
) -> Iterator[dict[str, Any]]:
    """Rows of JSONL files, folders of them, hub ids or presets (`train.presets`), read as a stream;
    lines that are no JSON object are counted.

    Raises ValueError for a source that is neither there nor shaped like a hub id.
    """
    for source in [sources] if isinstance(sources, str | Path) else sources:
        path = Path(source)
        if path.is_dir():
            files = sorted(path.glob("*.jsonl"))
            if not files:
                raise ValueError(f"folder {source} holds no .jsonl file; name a file or a hub id")
        elif path.is_file():
            files = [path]
        elif source in PRESETS:
            for part in PRESETS[str(source)]:
                yield from islice(_read_hub(part.hub, part.split), part.num_rows)
            continue
        else:
            yield from _read_hub(str(source), split)
            continue
        for file in files:
            yield from _read_file(file, rejected)


def _read_file(path: Path, rejected: Counter[str]) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:  # broken JSON or broken UTF-8
                rejected["broken JSON"] += 1
                continue
            if isinstance(row, dict):
                yield row
            else:
                rejected["not a JSON object"] += 1


def _read_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    if name.endswith((".json", ".jsonl")) or name.count("/") > 1 or name.startswith((".", "/")):
        raise ValueError(
            f"no file {name}; give a JSONL file, a folder of them, a hub id, or "
            f"one of {', '.join(PRESETS)}"
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split, streaming=True)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"{name!r} is no file here, and the hub gave no split {split!r} of it: {lines[0]}"
        ) from error
    for row in rows:
        yield dict(row)


def row_id(row: dict[str, Any]) -> str:
    """The row's own id, else a hash of its content: stable under reordering."""
    for key in ID_KEYS:
        if row.get(key) is not None:
            return str(row[key])
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reasons(rejected: Counter[str]) -> str:
    """Rejected rows by reason, most frequent first: "3 broken JSON, 1 no assistant turn"."""
    return ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "nothing"


def chat(row: dict[str, Any]) -> Chat:
    """The row's conversation: `messages`, or `conversations` (role/content or from/value).

    Raises Rejected for an unknown role, which must never be guessed to be the assistant's.
    """
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Rejected("no messages")
    return Chat([_message(turn) for turn in turns], _json_list(row.get("tools"), "tools"))


def prompt(row: dict[str, Any]) -> Chat:
    """What the target is to answer: `messages` without a final answer, `turns[0]` or `prompt`."""
    if row.get("messages") or row.get("conversations"):
        conversation = chat(row)
        while conversation.messages and conversation.messages[-1]["role"] == "assistant":
            conversation.messages.pop()
        if not conversation.messages:
            raise Rejected("no prompt before the answer")
        return conversation
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    if isinstance(text, list):
        return prompt({"messages": text, "tools": row.get("tools")})
    if not isinstance(text, str) or not text:
        raise Rejected("no messages, turns or prompt")
    return Chat([{"role": "user", "content": text}], _json_list(row.get("tools"), "tools"))


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise Rejected(f"unknown role {str(name)[:40]!r}")
    message: dict[str, Any] = {"role": role, "content": _text(turn)}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    calls = _json_list(turn.get("tool_calls"), "tool_calls")
    if role == "assistant" and reasoning:
        message["reasoning_content"] = reasoning
    if role == "assistant" and calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    return message


def _text(turn: dict[str, Any]) -> str:
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content} - {"text"}
        if kinds:
            raise Rejected(f"content of type {str(sorted(map(str, kinds))[0])[:40]!r}")
        return "".join(part["text"] for part in content)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise Rejected("content is neither text nor a list of parts")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("a tool call without a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise Rejected("tool call arguments are no JSON") from None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made


def _json_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise Rejected(f"{name} is no JSON") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise Rejected(f"{name} is no list")
    return value
