"""A small recorded session in the project's schema, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

CODE = "     1\tdef add(first, second):\n     2\t    return first + second\n"


def message(i: int, turn: int, kind: str, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "i": i,
        "turn": turn,
        "kind": kind,
        "agent": more.pop("agent", "coder"),
        "scope": more.pop("scope", "main"),
        "role": role,
        "text": text,
        **more,
    }


def session_row(name: str = "moat-1/a", split: str = "eval") -> dict[str, Any]:
    """Four calls: the coder's, a searcher's in a scope of its own, and two more of the coder's,
    of which the last doesn't read the transient failure before it."""
    search = {"id": "1", "name": "view", "arguments": '{"path": "a.py"}'}
    opened = [{"path": "a.py", "span": [5, 5 + len(CODE)], "numbering": "tab"}]
    return {
        "schema": "agtraj/1",
        "session_id": name,
        "scaffold": "moat",
        "scaffold_version": "1",
        "model": "fox",
        "split": split,
        "messages": [
            message(0, 1, "prompt", "system", "You fix the fox."),
            message(1, 1, "prompt", "user", "The dog jumps."),
            message(2, 1, "generated", "assistant", "I look.", tool_calls=[search, search]),
            message(3, 2, "tool_output", "user", "Which one?", scope="search:1", agent="search"),
            message(4, 2, "generated", "assistant", "a.py", scope="search:1", agent="search"),
            message(5, 3, "tool_output", "tool", "Here\n" + CODE, opened=opened),
            message(6, 3, "generated", "assistant", "Wrong edit", transient=True, edits=[{}]),
            message(7, 4, "tool_output", "tool", "No such line", transient=True),
            message(8, 4, "generated", "assistant", "def add(first, second):\n    return 2\n"),
            message(9, 5, "prompt", "user", "Thank you."),
            message(10, 5, "generated", "assistant", "You are welcome."),
        ],
    }


def write_sessions(path: Path, *rows: dict[str, Any]) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)
