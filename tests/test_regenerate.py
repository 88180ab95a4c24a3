from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dlite.config import parse
from dlite.decode import decode
from dlite.target import TargetModel
from dlite.types import Request, Sampling
from train import regenerate as program
from train.data import load_samples
from train.regenerate import Config, load_prompts, regenerate

ROOT = Path(__file__).parents[1]
ASKED = ("Where is the fox?", "Add two numbers.", "Hi", "Jump over the lazy dog", "42?", "Who?")


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, tiny_target: TargetModel) -> None:
    """The tiny target is what its folder holds; loading it again for each run takes time only."""
    monkeypatch.setattr(TargetModel, "load", lambda *_, **__: tiny_target)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"id": f"p{i}", "turns": [q]}) + "\n" for i, q in enumerate(ASKED))
    )
    return file


def run(prompts: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    """Runs the program in this process; `target` is only a name here."""
    common = [f"prompts={prompts}", f"out={out}", "target=tiny", "max_new_tokens=12"]
    regenerate(parse(Config, [*common, *options]))
    return read(out)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def read_whole(out: Path) -> list[dict[str, Any]]:
    """The rows without a torn last one."""
    whole, _, _ = out.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows}


# The answers


@pytest.mark.parametrize("options", [(), ("drafter=ngram", "batch_size=3"), ("batch_size=1",)])
def test_rows_hold_the_targets_own_ids_whatever_the_batch_and_the_drafter(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel, options: tuple[str, ...]
) -> None:
    rows = by_id(run(prompts, tmp_path / "out.jsonl", *options))
    assert set(rows) == {f"p{i}" for i in range(len(ASKED))}
    for i, question in enumerate(ASKED):
        messages = [{"role": "user", "content": question}]
        request = Request(f"p{i}", tiny_target.render(messages), 12)
        (completion,) = decode(tiny_target, [request], None).completions
        row = rows[f"p{i}"]
        assert row["answer_ids"] == completion.tokens
        assert row["finish_reason"] == completion.finish_reason
        assert row["messages"][:-1] == messages
        assert row["messages"][-1]["role"] == "assistant"


def test_training_reads_the_prompt_and_the_ids_as_they_were_generated(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = "template_kwargs.enable_thinking=true"
    uncut = by_id(run(prompts, tmp_path / "uncut.jsonl", thinking))
    second_end = uncut["p1"]["answer_ids"][4]
    monkeypatch.setattr(tiny_target, "eos_ids", frozenset({2, second_end}))
    rows = by_id(run(prompts, out := tmp_path / "out.jsonl", thinking))
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
    kwargs = {"enable_thinking": True}
    samples = load_samples(out, tiny_target, template_kwargs=kwargs).samples
    for sample in samples:
        row = rows[sample.id]
        prompt = tiny_target.render(row["messages"][:-1], **kwargs)
        assert sample.input_ids == prompt + row["answer_ids"]
        assert sample.loss_mask == [i >= len(prompt) for i in range(len(sample.input_ids))]
        assert row["finish_reason"] == (
            "stop" if row["answer_ids"][-1] in (2, second_end) else "length"
        )
    assert "p1" in {sample.id for sample in samples}


def test_sampled_answers_depend_on_seed_and_id_not_on_batch_or_interruption(
    prompts: Path, tmp_path: Path
) -> None:
    first = by_id(run(prompts, tmp_path / "a.jsonl", "temperature=1"))
    run(prompts, tmp_path / "b.jsonl", "temperature=1", "limit=2")
    second = by_id(run(prompts, tmp_path / "b.jsonl", "temperature=1", "batch_size=1"))
    other = by_id(run(prompts, tmp_path / "c.jsonl", "temperature=1", "seed=1"))
    assert first == second
    assert first != other


# Resuming


def test_rows_there_are_not_answered_again(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    first = run(prompts, out, "limit=4")
    assert len(first) == 4
    assert run(prompts, out)[:4] == first
    assert len(read(out)) == len(ASKED)
    before = out.read_bytes()
    run(prompts, out)
    assert out.read_bytes() == before
    assert "0 answers of 0 tokens" in capsys.readouterr().out


def test_a_torn_last_line_is_dropped_and_answered_again(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    whole = by_id(run(prompts, out))
    text = out.read_bytes()
    for cut in (len(text) - 1, len(text) - 40, len(text) - len(text.splitlines()[-1]) - 1):
        out.write_bytes(text[:cut])
        assert by_id(rows := run(prompts, out)) == whole
        assert len(rows) == len(whole)


KILLER = """
import os, signal, sys, time
from pathlib import Path
from dlite.config import parse
from train.regenerate import Config, regenerate

options, out = sys.argv[1:], Path(dict(o.split("=", 1) for o in sys.argv[1:])["out"])
for goal in (1, 9, 20, 33, 45):  # rows to wait for; imported once, so that forks start fast
    child = os.fork()
    if child == 0:
        regenerate(parse(Config, options))
        os._exit(0)
    while not (out.exists() and out.read_bytes().count(b"\\n") >= goal):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.001)
    time.sleep(goal % 5 / 500)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), goal
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_and_doubles_no_row(tiny_folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    names = [f"p{i}" for i in range(60)]
    prompts.write_text(
        "".join(json.dumps({"id": n, "prompt": f"Who is {n}?"}) + "\n" for n in names)
    )
    options = [f"target={tiny_folder}", f"prompts={prompts}", f"out={out}"]
    options += ["batch_size=2", "max_new_tokens=12"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", KILLER, *options], cwd=ROOT, env=env, check=True)
    killed = by_id(read_whole(out))
    assert 45 <= len(killed) < 60
    command = [sys.executable, "-m", "train.regenerate", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert sorted(row["id"] for row in rows) == sorted(names)
    assert f"{60 - len(killed)} answers of" in done.stdout
    assert by_id(rows) == by_id(run(prompts, tmp_path / "straight.jsonl"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("max_new_tokens=13",), "max_new_tokens=12, this run has max_new_tokens=13"),
        (("temperature=0.5",), "temperature=0.0, this run has seed=0, temperature=0.5, top"),
        (("dtype=bfloat16",), "dtype=float32, this run has dtype=bfloat16"),
        (("template_kwargs.enable_thinking=true",), "template_kwargs={}"),
    ],
)
def test_rows_made_with_other_settings_are_never_mixed(
    prompts: Path, tmp_path: Path, options: tuple[str, ...], named: str
) -> None:
    out = tmp_path / "out.jsonl"
    run(prompts, out, "limit=2")
    before = out.read_bytes()
    with pytest.raises(ValueError, match="overwrite=true") as caught:
        run(prompts, out, *options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert out.read_bytes() == before
    assert len(run(prompts, out, *options, "overwrite=true")) == len(ASKED)
    assert len(run(prompts, out, *options)) == len(ASKED)


def test_another_targets_rows_are_never_mixed(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    run(prompts, out, "limit=2")
    weight = tiny_target.model.model.norm.weight
    weight.mul_(1.5)
    try:
        with pytest.raises(ValueError, match=r"was made with weights=\w+, this run has weights="):
            run(prompts, out)
    finally:
        weight.div_(1.5)


def test_answers_without_their_settings_file_are_refused(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(prompts, out, "limit=2")
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings\.json, .* is missing"):
        run(prompts, out)


def test_broken_and_doubled_answer_rows_are_named(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(prompts, out, "limit=2")
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"{\n" + second)
    with pytest.raises(ValueError, match=r"line 1 of .*is no answer row"):
        run(prompts, out)
    out.write_bytes(first + first)
    with pytest.raises(ValueError, match="two rows of id 'p0'"):
        run(prompts, out)


def test_two_processes_never_write_one_file(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    settings = {"max_new_tokens": 12}
    file = program.AnswerFile(out, settings, overwrite=False)
    with pytest.raises(ValueError, match="another process is writing"):
        run(prompts, out)
    file.close()
    assert len(run(prompts, out)) == len(ASKED)


# Prompts


def test_prompts_of_every_format_are_read_and_others_counted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "A"}
    rows = [
        {"id": 1, "messages": [user, {"role": "assistant", "content": "old"}]},
        {"question_id": 81, "turns": ["A", "B"]},
        {"prompt": "A"},
        {"id": "list", "prompt": [user], "tools": [{"name": "f"}]},
        {"id": "sharegpt", "conversations": [{"from": "human", "value": "A"}]},
        {"prompt": "A"},
        {"id": "none"},
        {"id": "who", "messages": [{"role": "critic", "content": "A"}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("{torn\n" + "".join(json.dumps(row) + "\n" for row in rows))
    rejected: Counter[str] = Counter()
    chats = load_prompts(Config([str(file)], "out", target="tiny"), rejected)
    assert [name for name in chats if len(name) != 16] == ["1", "81", "list", "sharegpt"]
    assert len(chats) == 5
    assert all(chat.messages == [user] for chat in chats.values())
    assert chats["list"].tools == [{"name": "f"}]
    assert rejected == {
        "broken JSON": 1,
        "the same prompt again": 1,
        "no messages, turns or prompt": 1,
        "unknown role 'critic'": 1,
    }
    file.write_text(json.dumps({"id": 1, "prompt": "A"}) + "\n" + '{"id": "1", "prompt": "B"}')
    with pytest.raises(ValueError, match="two rows of id '1'"):
        load_prompts(Config([str(file)], "out", target="tiny"), rejected)


def test_a_prompt_beyond_the_target_is_left_out_and_said(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "fox " * 600}) + "\n")
    rows = run(prompts, tmp_path / "out.jsonl")
    assert len(rows) == len(ASKED)
    assert "left out: 1 prompt + max_new_tokens exceed the target's 512" in capsys.readouterr().out
    prompts.write_text(json.dumps({"id": "long", "prompt": "fox " * 600}))
    with pytest.raises(ValueError, match="none of 1 prompts got an answer: 1 prompt"):
        run(prompts, tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["target=x", "drafter=eagle"], "drafter is 'eagle'"),
        (["target=x", "batch_size=0"], "batch_size is 0"),
        (["target=x", "temperature=-1"], "temperature is -1"),
        ([], "target is missing"),
        (["server=http://127.0.0.1:1"], "model is missing"),
        (["server=127.0.0.1:1", "model=m"], "server is '127.0.0.1:1'"),
    ],
)
def test_bad_options_are_one_line(
    prompts: Path, tmp_path: Path, options: list[str], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        regenerate(parse(Config, [f"prompts={prompts}", f"out={tmp_path / 'o'}", *options]))
    assert "\n" not in str(caught.value)


# Servers


class ChatServer(ThreadingHTTPServer):
    """/v1/chat/completions of a target, on a free port. Not a canned answer: it decodes."""

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
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with self.server.lock:
            if len(self.server.answered) == self.server.dies_after:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, reply = self.server.complete(body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(target: TargetModel, **options: Any) -> Iterator[ChatServer]:
    with ChatServer(target, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: str, prompts: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    return run(prompts, out, f"server={server}", "model=tiny", "concurrency=3", *options)


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_servers_answers_are_the_targets(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel, tells_ids: bool
) -> None:
    local = by_id(run(prompts, tmp_path / "local.jsonl"))
    with serving(tiny_target, tells_ids=tells_ids) as server:
        rows = by_id(ask(server.url, prompts, tmp_path / "out.jsonl"))
    for row in local.values():
        if not tells_ids:
            del row["answer_ids"]
    assert rows == local


def test_a_busy_server_is_asked_again(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    with serving(tiny_target, tells_ids=True, fails_first=2) as server:
        assert len(ask(server.url, prompts, tmp_path / "out.jsonl")) == len(ASKED)


def test_a_server_that_dies_midway_ends_the_run_and_the_next_one_goes_on(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    out = tmp_path / "out.jsonl"
    with (
        serving(tiny_target, tells_ids=True, dies_after=3) as server,
        pytest.raises(ValueError, match="failed 2 times, last with: "),
    ):
        ask(server.url, prompts, out, "retries=1")
    assert len(read(out)) == 3
    with serving(tiny_target, tells_ids=True) as server:
        rows = ask(server.url, prompts, out)
        assert len(server.answered) == len(ASKED) - 3
    assert sorted(row["id"] for row in rows) == [f"p{i}" for i in range(len(ASKED))]


def test_a_dead_server_ends_in_bounded_time_with_its_last_error(
    prompts: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ValueError, match="refused") as caught:
        ask(f"http://127.0.0.1:{port}/v1", prompts, tmp_path / "out.jsonl", "retries=2")
    assert time.monotonic() - start < 5
    assert "failed 3 times" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_ends_after_timeout_seconds(
    prompts: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        start = time.monotonic()
        with pytest.raises(ValueError, match="timed out"):
            ask(url, prompts, tmp_path / "out.jsonl", "timeout_seconds=0.5")
        assert time.monotonic() - start < 5


def test_a_row_that_the_server_refuses_is_left_out_and_said(
    prompts: Path,
    tmp_path: Path,
    tiny_target: TargetModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "fox " * 600}) + "\n")
    with serving(tiny_target, tells_ids=True) as server:
        rows = ask(server.url, prompts, tmp_path / "out.jsonl")
    assert len(rows) == len(ASKED)
    assert all("answer_ids" in row for row in rows)
    assert "left out: 1 the server refuses it: HTTP 400" in capsys.readouterr().out


def test_a_wrong_model_name_ends_the_run_at_once(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    with (
        serving(tiny_target, tells_ids=True) as server,
        pytest.raises(ValueError, match=r"failed 1 times, last with: HTTP 404.*no model other"),
    ):
        ask(server.url, prompts, tmp_path / "out.jsonl", "model=other")


def test_a_server_with_another_template_than_the_targets_is_found_out(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherTemplate(ChatServer):
        def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            return super().complete({**body, "chat_template_kwargs": {"enable_thinking": True}})

    monkeypatch.setitem(globals(), "ChatServer", OtherTemplate)
    with (
        serving(tiny_target, tells_ids=True) as server,
        pytest.raises(ValueError, match="give both the same chat template and template_kwargs"),
    ):
        ask(server.url, prompts, tmp_path / "out.jsonl")
    thinking = "template_kwargs.enable_thinking=true"
    with serving(tiny_target, tells_ids=True) as server:
        assert len(ask(server.url, prompts, tmp_path / "on.jsonl", thinking)) == len(ASKED)
