"""What a request may tell the drafters of the agent behind it: names, limits, refusals.

Over the OpenAI API the keys travel in `vllm_xargs`; nested values are JSON strings there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlite.drafters.structure import parse_structure
from dlite.types import AgentContext, OpenedFile, SessionKey

PREFIX = "dlite_"
TENANT, SESSION, END = "dlite_tenant_id", "dlite_session_id", "dlite_session_end"
AGENT, QUERY = "dlite_agent_id", "dlite_query_id"
STRUCTURE, FILES, DRAFTER = "dlite_structure", "dlite_opened_files", "dlite_drafter"
KEYS = (TENANT, SESSION, END, AGENT, QUERY, STRUCTURE, FILES, DRAFTER)

MAX_ID_CHARS = 256
MAX_FILES = 256
MAX_FILES_CHARS = 4 << 20  # of all texts of one request


@dataclass(frozen=True, slots=True)
class Metadata:
    """`session` None: the call shares nothing. `end_session`: its corpora go when the call ends.
    `drafter`: one of those that the server has loaded; "": its default."""

    session: SessionKey | None = None
    agent: AgentContext = field(default_factory=AgentContext)
    end_session: bool = False
    drafter: str = ""


def parse_metadata(extra: Mapping[str, Any] | None) -> Metadata:
    """From a request's extra arguments; those without our prefix are not ours.

    Raises ValueError, in one line, for an unknown key and for a bad value.
    """
    given = {key: value for key, value in (extra or {}).items() if key.startswith(PREFIX)}
    if not given:
        return Metadata()
    if unknown := sorted(given.keys() - set(KEYS)):
        raise ValueError(f"{unknown[0][:60]!r} is no key of ours; known are {', '.join(KEYS)}")
    session = _id(given, SESSION)
    end = given.get(END, 0)
    if end not in (0, 1):
        raise ValueError(f"{END} is {_shown(end)}; give true or false")
    if end and not session:
        raise ValueError(f"{END} is true without {SESSION}; say which session ends")
    structure = given.get(STRUCTURE)
    return Metadata(
        session=SessionKey(_id(given, TENANT), session) if session else None,
        agent=AgentContext(
            agent_id=_id(given, AGENT),
            query_id=_id(given, QUERY),
            structure=None if structure is None else parse_structure(_text(structure, STRUCTURE)),
            files=_files(given[FILES]) if FILES in given else (),
        ),
        end_session=bool(end),
        drafter=_id(given, DRAFTER),
    )


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_shown(value)}; give a string")
    return value


def _id(given: Mapping[str, Any], key: str) -> str:
    value = _text(given.get(key, ""), key)
    if len(value) > MAX_ID_CHARS:
        raise ValueError(f"{key} is {len(value)} characters long; give at most {MAX_ID_CHARS}")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
        raise ValueError(f"{key} is {_shown(value)}, with a control character; leave it out")
    return value


def _files(value: Any) -> tuple[OpenedFile, ...]:
    try:
        files = json.loads(_text(value, FILES))
    except (ValueError, RecursionError):
        raise ValueError(f"{FILES} is {_shown(value)}; give a JSON list as a string") from None
    if not isinstance(files, list) or len(files) > MAX_FILES:
        raise ValueError(f"{FILES} is {_shown(files)}; give a list of at most {MAX_FILES} files")
    for number, file in enumerate(files):
        if (
            not isinstance(file, dict)
            or file.keys() != {"path", "text"}
            or not all(isinstance(value, str) for value in file.values())
        ):
            raise ValueError(
                f'{FILES}[{number}] is {_shown(file)}; give {{"path", "text"}} (a reference to a '
                "message needs dlite's middleware)"
            )
    if (size := sum(len(file["text"]) for file in files)) > MAX_FILES_CHARS:
        raise ValueError(
            f"{FILES} holds {size} characters; give at most {MAX_FILES_CHARS}, the rest in a "
            "later call"
        )
    return tuple(OpenedFile(file["path"], file["text"]) for file in files)


def _shown(value: Any) -> str:
    """For a message of one line, however long the value."""
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
