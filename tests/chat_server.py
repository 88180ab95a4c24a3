"""A real chat completions server for tests: what it says, the target decoded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dlite.decode import decode
from dlite.target import TargetModel
from dlite.types import Request, Sampling


class ChatServer(ThreadingHTTPServer):
    """/v1/chat/completions of a target, on a free port."""

    def __init__(
        self, target: TargetModel, *, tells_ids: bool, dies_after: int = -1, fails_first: int = 0
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Completions)
        self.target, self.tells_ids = target, tells_ids
        self.dies_after, self.fails_first = dies_after, fails_first
        self.lock = threading.Lock()
        self.answered: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.fails_first:
            self.fails_first -= 1
            return 503, {"error": "still loading"}
        if "return_token_ids" in body and not self.tells_ids:
            return 400, {"error": "Unrecognized request argument: return_token_ids"}
        if body["model"] != "tiny":
            return 404, {"error": f"no model {body['model']}"}
        kwargs = body.get("chat_template_kwargs", {})
        prompt = self.target.render(body["messages"], **kwargs)
        if len(prompt) + body["max_tokens"] > self.target.max_length:
            return 400, {"error": f"{len(prompt)} prompt tokens are too many"}
        sampling = Sampling(body["temperature"], seed=body.get("seed"))
        request = Request("r", prompt, body["max_tokens"], sampling=sampling)
        (completion,) = decode(self.target, [request], None).completions
        ids = completion.tokens
        text = self.target.tokenizer.decode(ids, skip_special_tokens=True)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": completion.finish_reason,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        self.answered.append(body["messages"][-1]["content"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}


class _Completions(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, ChatServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with server.lock:
            if len(server.answered) == server.dies_after:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, reply = server.complete(body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(
    target: TargetModel, kind: type[ChatServer] = ChatServer, **options: Any
) -> Iterator[ChatServer]:
    with kind(target, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
