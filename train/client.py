"""Answers from an OpenAI-compatible server: chat completions, concurrent and bounded in time."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

from train.rows import Rejected

REFUSALS = (400, 413, 422)  # the server's verdict on one request; another try gives the same
FIRST_PAUSE_SECONDS = 0.5  # doubled with each repetition


class ServerError(ValueError):
    """The server is gone, or answers nothing of use."""


@dataclass(slots=True)
class Reply:
    message: dict[str, Any]
    finish_reason: str
    num_tokens: int
    answer_ids: list[int] | None  # vLLM's extension; other servers tell no ids
    num_prompt_tokens: int | None


class ChatClient:
    """Threads may share it. A request fails for good after `retries` repetitions with growing
    pauses, or after `timeout_seconds` in all."""

    def __init__(self, url: str, *, retries: int, timeout_seconds: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server is {url!r}; give its URL, as in http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.retries, self.timeout_seconds = retries, timeout_seconds
        self._asks_for_ids = True

    def complete(self, body: dict[str, Any]) -> Reply:
        """Raises Rejected when the server refuses this request, ServerError when it is gone."""
        if self._asks_for_ids:
            try:
                return _reply(self._post({**body, "return_token_ids": True}))
            except Rejected:  # the request itself is refused, or only vLLM's extension
                reply = _reply(self._post(body))
                self._asks_for_ids = False
                return reply
        return _reply(self._post(body))

    def complete_all(
        self, bodies: Iterable[tuple[str, dict[str, Any]]], concurrency: int
    ) -> Generator[tuple[str, Reply | Rejected]]:
        """Replies by name as they come. At most `concurrency` requests are under way, and bodies
        are taken as there is room. When the server is gone, what was under way comes first."""

        def ask(name: str, body: dict[str, Any]) -> tuple[str, Reply | Rejected | ServerError]:
            try:
                return name, self.complete(body)
            except (Rejected, ServerError) as error:
                return name, error

        waiting, failure = iter(bodies), None
        with ThreadPoolExecutor(concurrency) as pool:
            running = {pool.submit(ask, *item) for item in islice(waiting, concurrency)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name, reply = future.result()
                    if isinstance(reply, ServerError):
                        failure = failure or reply
                    else:
                        yield name, reply
                if failure is None:
                    room = concurrency - len(running)
                    running |= {pool.submit(ask, *item) for item in islice(waiting, room)}
        if failure is not None:
            raise failure

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("DLITE_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self.timeout_seconds
        pause, tries = FIRST_PAUSE_SECONDS, 0
        while True:
            tries += 1
            try:
                left = max(0.1, deadline - time.monotonic())
                with urllib.request.urlopen(request, timeout=left) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                fault = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code in REFUSALS:
                    raise Rejected(f"the server refuses it: {_line(fault)}") from None
                final = error.code < 500 and error.code != 429
            except (OSError, http.client.HTTPException, ValueError) as error:
                fault, final = str(error) or type(error).__name__, False
            if final or tries > self.retries or time.monotonic() + pause > deadline:
                raise ServerError(
                    f"server {self.url} failed {tries} times, last with: {_line(fault)}; answers "
                    "so far are kept, so mend the server and run the same command again"
                )
            time.sleep(pause)
            pause *= 2


def _line(text: str) -> str:
    return " ".join(text.split())[:160]


def _reply(body: dict[str, Any]) -> Reply:
    try:
        choice, usage = body["choices"][0], body.get("usage") or {}
        said = choice["message"]
        message = {"role": "assistant", "content": said.get("content") or ""}
        if reasoning := said.get("reasoning_content") or said.get("reasoning"):
            message["reasoning_content"] = reasoning
        if said.get("tool_calls"):
            message["tool_calls"] = said["tool_calls"]
        ids = choice.get("token_ids")
        num_tokens = usage.get("completion_tokens") or len(ids or ())
        finish_reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(
            f"the server's answer is no chat completion: {str(body)[:120]}; check the URL"
        ) from None
    return Reply(message, finish_reason, num_tokens, ids, usage.get("prompt_tokens"))
