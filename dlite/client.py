"""What an agent sends along with a call, for any OpenAI-compatible client.

client.chat.completions.create(..., extra_body=extra_body(session="run 7", agent="coder"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlite import metadata
from dlite.types import OpenedFile


def extra_body(
    *,
    session: str = "",
    agent: str = "",
    query: str = "",
    structure: Sequence[Any] = (),
    files: Sequence[OpenedFile | Mapping[str, Any]] = (),
    end_session: bool = False,
    drafter: str = "",
) -> dict[str, Any]:
    """The `extra_body` of a request to a server of ours. What is empty is left out.

    `structure`: groups of delimiter pairs, see `dlite.drafters.structure`. `files`: what the agent
    opened since its last call, as OpenedFile or, where the text is in a message of this request,
    `{"path", "message", "span"}` (the message's number and the characters [start, end) of it).
    Raises ValueError for what the server would refuse.
    """
    given: dict[str, Any] = {
        metadata.SESSION: session,
        metadata.AGENT: agent,
        metadata.QUERY: query,
        metadata.DRAFTER: drafter,
        metadata.END: int(end_session),
        metadata.STRUCTURE: json.dumps(structure) if structure else "",
        metadata.FILES: _files(files) if files else "",
    }
    given = {key: value for key, value in given.items() if value}
    by_text = [file for file in files if isinstance(file, OpenedFile) or "text" in file]
    checked = {**given, **({metadata.FILES: _files(by_text)} if by_text else {})}
    if not by_text:
        checked.pop(metadata.FILES, None)
    metadata.parse_metadata(checked)
    return {"vllm_xargs": given} if given else {}


def _files(files: Sequence[OpenedFile | Mapping[str, Any]]) -> str:
    return json.dumps(
        [
            {"path": file.path, "text": file.text} if isinstance(file, OpenedFile) else dict(file)
            for file in files
        ]
    )
