"""Recorded sessions: three schemas, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_rows import CODE, session_row, write_sessions

from dlite.types import OpenedFile
from eval.traces import read_sessions


def test_a_tool_call_is_missing_from_what_the_model_emitted(tmp_path: Path) -> None:
    (session,) = read_sessions([write_sessions(tmp_path / "s.jsonl.gz", session_row())])
    assert (session.id, session.group, session.model) == ("moat-1/a", "moat-1", "fox")
    call = '<tool_call>\n{"name": "view", "arguments": {"path": "a.py"}}\n</tool_call>'
    assert session.messages[2].text == f"I look.\n{call}\n{call}"
    assert [m.turn for m in session.messages if m.generated] == [1, 2, 3, 4, 5]


def test_an_opened_file_is_cut_elsewhere_than_its_span(tmp_path: Path) -> None:
    (session,) = read_sessions([write_sessions(tmp_path / "s.jsonl", session_row())])
    files = [file for m in session.messages for file in m.files]
    assert files == [OpenedFile("a.py", CODE)]


def test_a_session_of_another_split_is_read(tmp_path: Path) -> None:
    rows = [session_row("a", "dev"), session_row("b", "eval"), session_row("c", "eval")]
    name = write_sessions(tmp_path / "s.jsonl", *rows)
    assert [s.id for s in read_sessions([name], "eval")] == ["b", "c"]
    assert [s.id for s in read_sessions([name], "eval", limit=1)] == ["b"]
    with pytest.raises(ValueError, match=r"no session with split 'test' in .*it has dev, eval"):
        read_sessions([name], "test")


def test_openai_messages_lose_parts_or_turns(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}
    row: dict[str, Any] = {
        "id": "chat",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What "}, {"text": "is it?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "a.py", "tool_call_id": "1"},
            {"role": "assistant", "content": "A file."},
        ],
    }
    (session,) = read_sessions([write_sessions(tmp_path / "chat.jsonl", row)])
    assert [(m.text, m.turn, m.generated) for m in session.messages] == [
        ("What is it?", 1, False),
        ('<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>', 1, True),
        ("a.py", 2, False),
        ("A file.", 2, True),
    ]


def test_a_swe_agent_demonstration_counts_as_generated(tmp_path: Path) -> None:
    history = [
        {"role": "system", "content": "Fix it.", "agent": "primary"},
        {"role": "assistant", "content": "ls", "agent": "primary", "is_demo": True},
        {"role": "assistant", "content": "cat a.py", "agent": "primary"},
    ]
    (tmp_path / "task.traj").write_text(json.dumps({"history": history, "trajectory": []}))
    steps = [{"response": "ls", "observation": "a.py"}, {"response": "done", "observation": None}]
    (tmp_path / "steps.traj").write_text(json.dumps({"trajectory": steps}))
    steps_only, task = read_sessions([str(tmp_path)])
    assert [m.generated for m in task.messages] == [False, False, True]
    assert task.messages[2].agent == "primary"
    assert [m.text for m in steps_only.messages] == ["ls", "a.py", "done", ""]
    assert [m.turn for m in steps_only.messages] == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ('{"schema": "agtraj/2", "messages": []}', "schema is 'agtraj/2'"),
        ('{"messages": [{"role": "wizard", "content": ""}]}', "role 'wizard'"),
        ('{"messages": [{"content": ""}]}', "'role'"),
        ('{"messages": [], "id": "a"}\n{"messages": [], "id": "a"}', "'a' occurs twice"),
        ("[1]", "docs/sessions.md"),
    ],
)
def test_a_broken_file_ends_in_a_traceback(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_sessions([str(tmp_path / "s.jsonl")])


def test_a_folder_without_sessions_is_read_as_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no session file"):
        read_sessions([str(tmp_path)])
