"""What requests may say to drafters: read whole, or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlite import metadata
from dlite.client import extra_body
from dlite.metadata import parse_metadata
from dlite.types import OpenedFile, SessionKey


def test_what_the_client_sends_is_what_the_server_reads() -> None:
    body = extra_body(
        session="run 7",
        agent="coder",
        query="fix",
        structure=[[["<a>", "</a>"]]],
        files=[OpenedFile("a.py", "x = 1\n")],
        end_session=True,
        drafter="sam",
    )
    read = parse_metadata({**body["vllm_xargs"], metadata.TENANT: "t", "seed_of_others": 3})
    assert read.session == SessionKey("t", "run 7")
    assert (read.agent.agent_id, read.agent.query_id, read.drafter) == ("coder", "fix", "sam")
    assert read.agent.files == (OpenedFile("a.py", "x = 1\n"),)
    assert read.agent.structure is not None and read.agent.structure.pairs[0].open == b"<a>"
    assert read.end_session


def test_values_are_of_the_types_that_vllm_lets_through() -> None:
    """Nested lists, objects, booleans and null are refused or changed by vllm_xargs."""
    body = extra_body(session="s", structure=[[["<a>", "</a>"]]], end_session=True)
    assert all(type(value) in (str, int) for value in body["vllm_xargs"].values())
    assert extra_body() == {}


def test_a_call_without_a_session_shares_nothing() -> None:
    assert parse_metadata({metadata.AGENT: "a", metadata.TENANT: "t"}).session is None
    assert parse_metadata(None).session is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"dlite_sesion_id": "s"}, "'dlite_sesion_id' is no key of ours; known are"),
        ({"dlite_session_id": 5}, "dlite_session_id is 5; give a string"),
        ({"dlite_agent_id": "x" * 257}, "is 257 characters long; give at most 256"),
        ({"dlite_agent_id": "a\nb"}, "with a control character"),
        ({"dlite_session_end": 1}, "true without dlite_session_id"),
        ({"dlite_session_end": 2, "dlite_session_id": "s"}, "is 2; give true or false"),
        ({"dlite_structure": "[[1]]"}, "structure"),
        ({"dlite_opened_files": "[1"}, "give a JSON list as a string"),
        ({"dlite_opened_files": '{"a": 1}'}, "an object of 1; give a list of at most 256 files"),
        ({"dlite_opened_files": '[{"path": "a"}]'}, r"opened_files\[0\] is an object of 1; give"),
        ({"dlite_opened_files": '[{"path": "a", "message": 2}]'}, "needs dlite's middleware"),
        ({"dlite_opened_files": '[{"path": "a", "text": 7}]'}, "opened_files"),
        ({"dlite_opened_files": "[" * 100_000}, "give a JSON list as a string"),
    ],
)
def test_bad_values_are_refused_in_one_line(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        parse_metadata(extra)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_files_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "MAX_FILES_CHARS", 5)
    files = json.dumps([{"path": "a", "text": "abc"}, {"path": "b", "text": "abc"}])
    with pytest.raises(ValueError, match="holds 6 characters; give at most 5"):
        parse_metadata({metadata.FILES: files})


def test_the_client_refuses_what_the_server_would() -> None:
    with pytest.raises(ValueError, match="true without dlite_session_id"):
        extra_body(end_session=True)
