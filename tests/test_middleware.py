"""The ASGI middleware: whose request it is, headers for arguments, references for texts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dlite.vllm_plugin.middleware import Tenants, tenant


def post(
    body: bytes,
    path: str = "/v1/chat/completions",
    chunks: int = 1,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """(200, the body that the application got) or (status, the error's text)."""
    got: list[Any] = []
    sent: list[Any] = []
    size = max(1, -(-len(body) // chunks))
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        length = dict(scope["headers"]).get(b"content-length", b"").decode()
        got.append((json.loads(message["body"]), length == str(len(message["body"]))))
        assert (await receive())["type"] == "http.disconnect"

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in (headers or {}).items()
        ],
    }
    asyncio.run(Tenants(app)(scope, receive, send))
    if got:
        ((body_seen, length_fits),) = got
        assert length_fits or path == "/tokenize"
        return 200, body_seen
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]


def xargs(body: dict[str, Any], **headers: str) -> dict[str, Any]:
    status, seen = post(json.dumps(body).encode(), headers=headers)
    assert status == 200
    return seen["vllm_xargs"]


def test_a_client_cannot_name_its_tenant() -> None:
    body = {"vllm_xargs": {"dlite_tenant_id": "victim", "dlite_session_id": "s"}}
    seen = xargs(body, authorization="Bearer key-1")
    assert seen == {"dlite_tenant_id": tenant(b"Bearer key-1"), "dlite_session_id": "s"}
    assert xargs(body)["dlite_tenant_id"] == ""
    assert tenant(b"key-1") == tenant(b"Bearer key-1") != tenant(b"key-2")
    assert "key-1" not in seen["dlite_tenant_id"]


def test_a_client_cannot_name_it_in_vllms_token_interface_either() -> None:
    body = {"sampling_params": {"extra_args": {"dlite_tenant_id": "victim"}}}
    status, seen = post(json.dumps(body).encode(), path="/inference/v1/generate")
    assert status == 200
    assert seen["sampling_params"]["extra_args"]["dlite_tenant_id"] == ""


def test_headers_stand_for_arguments_and_the_body_wins() -> None:
    seen = xargs(
        {"vllm_xargs": {"dlite_agent_id": "body"}},
        x_dlite_session_id="s 1",
        x_dlite_agent_id="header",
        x_dlite_session_end="true",
    )
    assert seen["dlite_agent_id"] == "body"
    assert (seen["dlite_session_id"], seen["dlite_session_end"]) == ("s 1", 1)


def test_a_reference_becomes_the_text_of_its_message() -> None:
    messages = [
        {"role": "system", "content": "no"},
        {"role": "tool", "content": [{"type": "text", "text": "0123"}, {"text": "456789"}]},
    ]
    files = json.dumps([{"path": "a", "message": 1, "span": [2, 6]}, {"path": "b", "text": "t"}])
    seen = xargs({"messages": messages, "vllm_xargs": {"dlite_opened_files": files}})
    assert json.loads(seen["dlite_opened_files"]) == [
        {"path": "a", "text": "2345"},
        {"path": "b", "text": "t"},
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b"[" * 200_000, "no JSON object"),
        (b'{"vllm_xargs": [1]}', "vllm_xargs is no JSON object"),
        (
            b'{"vllm_xargs": {"dlite_opened_files": "[{\\"path\\": 1, \\"message\\": 4}]"}}',
            "not one of the request's 0 messages",
        ),
    ],
)
def test_what_cannot_be_read_is_answered_with_400(body: bytes, message: str) -> None:
    status, text = post(body)
    assert status == 400 and message in text


def test_a_body_in_pieces_is_read_whole() -> None:
    body = json.dumps({"messages": ["x" * 1000]}).encode()
    assert post(body, chunks=7)[1]["messages"] == ["x" * 1000]


def test_a_huge_body_is_refused_before_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlite.vllm_plugin.middleware.MAX_BODY_BYTES", 100)
    assert post(b" " * 300, chunks=3)[0] == 413


def test_other_paths_pass_untouched() -> None:
    assert post(b'{"a": 1}', path="/tokenize") == (200, {"a": 1})
