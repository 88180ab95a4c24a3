"""Servers to measure, and an OpenAI client that writes down when tokens arrive."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite import serve

# What vLLM brings itself: measured beside ours, each in a server of its own.
STOCK: dict[str, dict[str, Any] | None] = {
    "plain_async": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
}
PLAIN = "plain"  # our server with drafts switched off, so without asynchronous scheduling


@dataclass(frozen=True, slots=True)
class Ask:
    """One call: `extra` goes into the request's body. Of another `salt`, nothing is cached."""

    id: str
    messages: list[dict[str, str]]
    extra: dict[str, Any] = field(default_factory=dict)
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from sending; `num_tokens` as the server counts them."""

    id: str
    text: str
    num_tokens: int
    first_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and the drafter that requests to it name ("": a server of vLLM's own)."""

    url: str
    model: str
    drafter: str

    def ask(self, ask: Ask, max_tokens: int) -> Answer:
        """Raises ValueError with the server's words for a refusal."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": ask.messages,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.salt:
            body["cache_salt"] = ask.salt
        if self.drafter:
            xargs = {**ask.extra.get("vllm_xargs", {}), "dlite_drafter": self.drafter}
            body["vllm_xargs"] = xargs
        begin = time.perf_counter()
        first, text, tokens = 0.0, [], 0
        for event in _events(f"{self.url}/v1/chat/completions", body):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                text.append(choice["delta"].get("content") or "")
                if not first and (text[-1] or choice.get("finish_reason")):
                    first = time.perf_counter() - begin
        return Answer(ask.id, "".join(text), tokens, first, time.perf_counter() - begin)

    def counters(self) -> dict[str, float]:
        """Sums over labels of all counters."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            found: dict[str, float] = {}
            for line in answer.read().decode().splitlines():
                match = re.match(r"([a-z_]+:[a-z_]+)(?:\{.*\})? (\S+)$", line)
                if match:
                    found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found


def _events(url: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as answer:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if data and data != b"[DONE]":
                    yield json.loads(data)
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace")[:300]
        raise ValueError(f"the server refused a request ({error.code}): {words}") from None


@contextmanager
def endpoints(
    target: str,
    drafters: Sequence[str],
    draft: str | None,
    *,
    num_draft: int,
    flags: Sequence[str],
    logs: Path,
) -> Iterator[dict[str, Endpoint]]:
    """A server of ours for all of our drafters and plain decoding, and one for each of vLLM's own;
    all are up before the first is measured. Raises ValueError where one doesn't start."""
    ours = [name for name in drafters if name not in STOCK and name != PLAIN]
    lines = {
        "": serve.command(
            target, ours or ["sam"], draft, num_draft=num_draft, tenants=False, others=flags
        )
    }
    for name in (name for name in drafters if name in STOCK):
        lines[name] = [sys.executable, "-m", serve.SERVER, "--model", target, *flags]
        if (config := STOCK[name]) is not None:
            config = {**config, "num_speculative_tokens": num_draft}
            lines[name] += ["--speculative-config", json.dumps(config)]
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(_server(line, logs / f"server_{name or 'dlite'}.log"))
            for name, line in lines.items()
        }
        yield {
            name: Endpoint(urls[name], target, "")
            if name in STOCK
            else Endpoint(urls[""], target, "none" if name == PLAIN else name)
            for name in (PLAIN, *drafters)
        }


@contextmanager
def _server(line: Sequence[str], log: Path, limit_seconds: float = 900.0) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as metrics, log.open("w") as out:
        server = subprocess.Popen(
            [*line, "--host", "127.0.0.1", "--port", str(port)],
            env=serve.environment(metrics),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + limit_seconds
            while not serve.healthy(url):
                if server.poll() is not None or time.monotonic() > end:
                    raise ValueError(f"a server did not start; its last words are in {log}")
                time.sleep(1.0)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
