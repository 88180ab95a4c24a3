"""`dlite serve` as users run it: over HTTP, under load, with clients that break off or err."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from answer_runs import read
from conftest import save_tiny_llama
from test_regenerate import KILLER, ROOT

from dlite import serve
from dlite.client import extra_body
from dlite.config import parse
from eval.serving import Ask, Endpoint
from eval.throughput import Config, measure, rows
from train import regenerate

pytest.importorskip("vllm", reason="vLLM is not installed here: bash scripts/setup.sh vllm")

from vllm_engine import ENVIRONMENT

SECRET = "The quick brown fox jumps over"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "other", "answer"]


@dataclass
class Server:
    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, seconds: float = 120, key: str = "", **body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps({"model": self.model, "temperature": 0.0, **body}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.loads(answer.read())

    def text(self, prompt: str, **body: Any) -> str:
        return self.post(prompt=prompt, max_tokens=16, **body)["choices"][0]["text"]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return answer.read().decode()

    def resident_bytes(self) -> int:
        """Of the server and all that it started."""
        total, pids = 0, [self.process.pid]
        while pids:
            pid = pids.pop()
            children = Path(f"/proc/{pid}/task/{pid}/children")
            try:
                pids += map(int, children.read_text().split())
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            except OSError:
                continue
        return total


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("http")
    target = save_tiny_llama(
        root / "target", hidden_size=128, num_attention_heads=4, max_position_embeddings=256
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--dtype float32 --enforce-eager --max-num-seqs 32 --max-model-len 256"
    line = ["serve", str(target), "--drafter", "sam,ngram", "--port", str(port), *flags.split()]
    environment = {**serve.environment(""), **ENVIRONMENT}
    del environment["PROMETHEUS_MULTIPROC_DIR"], environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = root / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlite.cli", *line], stdout=out, stderr=out, env=environment
        )
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while not serve.healthy(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield Server(url, str(target), log, process)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def prompt_of(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(4, 30)))


def test_it_prints_the_command_that_it_runs(server: Server) -> None:
    assert "dlite.vllm_plugin.worker.Worker" in server.log.read_text()


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"dlite_agent": "a"}, "is no key of ours"),
        ({"dlite_drafter": "dlite"}, "this server has sam, ngram, none"),
        ({"dlite_opened_files": "[1]"}, "give"),
        ({"dlite_structure": "{"}, "structure"),
    ],
)
def test_bad_metadata_is_a_400_and_the_server_lives(
    server: Server, xargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.text("the", vllm_xargs=xargs)
    assert refusal.value.code == 400
    assert message in refusal.value.read().decode()
    assert server.text("the")


def test_load_with_aborts_and_errors_changes_no_answer_and_leaks_nothing(server: Server) -> None:
    draw = random.Random(0)
    prompts = [prompt_of(draw) for _ in range(30)]
    none = {"vllm_xargs": {"dlite_drafter": "none"}}
    plain = {prompt: server.text(prompt, **none) for prompt in prompts}

    def one(number: int) -> str:
        own = random.Random(number)
        prompt, kind = own.choice(prompts), own.random()
        session = f"session {number % 10}"
        xargs = extra_body(session=session, agent="coder", end_session=number % 50 >= 40)
        if kind < 0.05:
            xargs = {"vllm_xargs": {"dlite_session_end": 7}}
        try:
            seconds = 0.02 if kind > 0.8 else 120  # a client that goes away
            answer = server.text(prompt, seconds=seconds, key=f"key {number % 2}", **xargs)
        except urllib.error.HTTPError as error:
            return "refused" if error.code == 400 and kind < 0.05 else f"status {error.code}"
        except OSError:
            return "aborted" if kind > 0.8 else "lost"
        return "same" if answer == plain[prompt] else "differs"

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(one, range(200)))
        early = server.resident_bytes()
        results += list(pool.map(one, range(200, 1000)))
    assert set(results) == {"same", "refused", "aborted"}
    assert results.count("aborted") > 150 and results.count("refused") > 30
    assert server.resident_bytes() < 1.03 * early


def test_no_drafter_profits_from_prompts_that_another_one_read(server: Server) -> None:
    words = " ".join(random.Random(1).choices(WORDS, k=120))
    chains = [[Ask("one", [{"role": "user", "content": words}])]]
    config = Config(target="", suite=[], out="", drafter=["sam"], max_new_tokens=16)
    where = {
        "plain": Endpoint(server.url, server.model, "none"),
        "sam": Endpoint(server.url, server.model, "sam"),
    }
    runs = measure(where, chains, 1, config)
    for run in runs.values():
        assert run.counted["vllm:prompt_tokens_total"] > 2 * 128  # two answers, over a block each
        assert run.counted["vllm:prefix_cache_hits_total"] == 0
    assert [row.identical_share for row in rows("", 1, runs)] == [1.0, 1.0]


def test_counters_are_there_and_nothing_of_a_request_is(server: Server) -> None:
    server.text(f"{SECRET} the lazy dog. {SECRET}", **extra_body(session="s", agent="planner"))
    metrics = server.metrics()
    assert 'dlite:drafted_tokens_total{role="planner"' in metrics
    assert "dlite:draft_seconds_total" in metrics
    assert "vllm:spec_decode_num_draft_tokens_total" in metrics
    assert SECRET not in metrics and SECRET not in server.log.read_text()


@pytest.mark.slow
def test_two_thousand_answers_survive_five_kills(server: Server, tmp_path: Path) -> None:
    """R5, kill -9 of the client: its 2,000 rows are the 2,000 prompts."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    names = [f"p{i}" for i in range(2000)]
    prompts.write_text("".join(json.dumps({"id": n, "prompt": n}) + "\n" for n in names))
    options = [f"server={server.url}/v1", f"model={server.model}", f"prompts={prompts}"]
    options += [f"out={out}", "max_new_tokens=16", "concurrency=16"]
    killer = KILLER.replace("(1, 9, 20, 33, 45)", "(1, 300, 777, 1200, 1800)")
    subprocess.run([sys.executable, "-c", killer, *options], cwd=ROOT, check=True)
    assert 1800 <= len(read(out)) < 2000
    regenerate.regenerate(parse(regenerate.Config, options))
    rows = read(out)
    assert sorted(row["id"] for row in rows) == sorted(names)
    assert all(0 < len(row["answer_ids"]) <= 16 for row in rows)
