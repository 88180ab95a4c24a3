"""Between client and vLLM: whose request it is, and what its headers and references say.

    vllm serve ... --middleware dlite.vllm_plugin.middleware.Tenants

A tenant is an API key: its hash replaces any `dlite_tenant_id` that a client sends. Headers
`X-Dlite-<Key>` (Session-Id, Agent-Id, Query-Id, Session-End, Structure, Drafter) stand for the
`dlite_` arguments of the same names, for agents that can set headers but no body. An opened file
may be a reference to a message of its request: `{"path", "message", "span"}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dlite import metadata

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

GENERATES = ("/chat/completions", "/completions", "/responses", "/messages", "/generate")
MAX_BODY_BYTES = 64 << 20
HEADERS = {f"x-{key.replace('_', '-')}": key for key in metadata.KEYS if key != metadata.TENANT}


class Tenants:
    """ASGI middleware. A body that it can't read is answered with 400, a huge one with 413."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").rstrip("/")
        if scope["type"] != "http" or scope["method"] != "POST" or not path.endswith(GENERATES):
            return await self.app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                return await _refuse(send, 413, f"the body exceeds {MAX_BODY_BYTES} bytes")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        try:
            body = rewrite(body, headers)
        except ValueError as error:
            return await _refuse(send, 400, str(error))
        replaced = [(n, v) for n, v in scope["headers"] if n != b"content-length"]
        replaced.append((b"content-length", str(len(body)).encode()))
        sent = False

        async def receive_rewritten() -> MutableMapping[str, Any]:
            nonlocal sent
            if sent:
                return await receive()  # a disconnect, later
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app({**scope, "headers": replaced}, receive_rewritten, send)


def rewrite(body: bytes, headers: MutableMapping[str, bytes]) -> bytes:
    """The body that vLLM gets. Raises ValueError for one that is no JSON object."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ValueError("the body is no JSON object")
    arguments = request.setdefault("vllm_xargs", {})
    if arguments is None:
        arguments = request["vllm_xargs"] = {}
    if not isinstance(arguments, dict):
        raise ValueError("vllm_xargs is no JSON object")
    for header, key in HEADERS.items():
        if header in headers and key not in arguments:
            arguments[key] = _text(header, headers[header])
    if isinstance(arguments.get(metadata.END), str):
        arguments[metadata.END] = int(arguments[metadata.END].lower() in ("1", "true"))
    if metadata.FILES in arguments:
        arguments[metadata.FILES] = _resolve(arguments[metadata.FILES], request.get("messages"))
    places = [arguments]
    parameters = request.get("sampling_params")  # of vLLM's own token interface
    if isinstance(parameters, dict) and isinstance(parameters.get("extra_args"), dict):
        places.append(parameters["extra_args"])
    for place in places:
        place[metadata.TENANT] = tenant(headers.get("authorization", headers.get("x-api-key", b"")))
    return json.dumps(request).encode()


def tenant(key: bytes) -> str:
    """A name for the holder of an API key that doesn't tell the key; "" without one."""
    key = key.removeprefix(b"Bearer ").strip()
    return hashlib.sha256(b"dlite tenant " + key).hexdigest()[:32] if key else ""


def _text(header: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"header {header} is no UTF-8") from None


def _resolve(files: Any, messages: Any) -> Any:
    """References to messages replaced by their text; the rest is checked later, with its keys."""
    try:
        entries = json.loads(files) if isinstance(files, str) else None
    except (ValueError, RecursionError):
        return files
    if not isinstance(entries, list):
        return files
    resolved = []
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and "message" in entry:
            at = f"{metadata.FILES}[{number}]"
            entry = {"path": entry.get("path"), "text": _quoted(entry, messages, at)}
        resolved.append(entry)
    return json.dumps(resolved)


def _quoted(entry: dict[str, Any], messages: Any, at: str) -> str:
    count = len(messages) if isinstance(messages, list) else 0
    place, span = entry["message"], entry.get("span", [0, metadata.MAX_FILES_CHARS])
    if not isinstance(place, int) or not 0 <= place < count:
        raise ValueError(f"{at}.message is not one of the request's {count} messages")
    if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)):
        raise ValueError(f"{at}.span is not [start, end) in characters")
    content = messages[place].get("content") if isinstance(messages[place], dict) else None
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        content = "".join(str(part.get("text", "")) for part in parts)
    if not isinstance(content, str):
        raise ValueError(f"{at}.message has no text")
    return content[span[0] : span[1]]


async def _refuse(send: Send, status: int, text: str) -> None:
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
