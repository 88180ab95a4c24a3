from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from answer_runs import ASKED, by_id, read, run, write_prompts
from chat_server import ChatServer, serving
from test_regenerate import KILLER, ROOT

from dlite.config import parse
from dlite.target import TargetModel
from train.data import load_samples
from train.regenerate import Config, regenerate


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


def ask(server: str, prompts: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    return run(None, prompts, out, f"server={server}", "model=tiny", "concurrency=3", *options)


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_servers_answers_are_the_targets(
    prompts: Path, tmp_path: Path, tiny_folder: Path, tiny_target: TargetModel, tells_ids: bool
) -> None:
    local = by_id(run(tiny_folder, prompts, tmp_path / "local.jsonl"))
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


def test_rows_without_text_need_a_server_that_tells_its_ids(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    with (
        serving(tiny_target, tells_ids=False) as server,
        pytest.raises(ValueError, match="text=false, but the server gives no token ids"),
    ):
        ask(server.url, prompts, tmp_path / "out.jsonl", "text=false")


def test_a_wrong_model_name_ends_the_run_at_once(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    with (
        serving(tiny_target, tells_ids=True) as server,
        pytest.raises(ValueError, match=r"failed 1 times, last with: HTTP 404.*no model other"),
    ):
        ask(server.url, prompts, tmp_path / "out.jsonl", "model=other")


def test_a_server_with_another_template_than_the_targets_is_found_out(
    prompts: Path, tmp_path: Path, tiny_folder: Path, tiny_target: TargetModel
) -> None:
    class OtherTemplate(ChatServer):
        def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            return super().complete({**body, "chat_template_kwargs": {"enable_thinking": True}})

    with (
        serving(tiny_target, OtherTemplate, tells_ids=True) as server,
        pytest.raises(ValueError, match="give both the same chat template and template_kwargs"),
    ):
        ask(server.url, prompts, tmp_path / "out.jsonl", f"target={tiny_folder}")
    thinking = (f"target={tiny_folder}", "template_kwargs.enable_thinking=true")
    with serving(tiny_target, tells_ids=True) as server:
        assert len(ask(server.url, prompts, tmp_path / "on.jsonl", *thinking)) == len(ASKED)


def test_workers_share_the_prompts_and_training_reads_their_folder(
    prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    """Every prompt is some worker's, whatever order they run in."""
    out = tmp_path / "answers"
    with serving(tiny_target, tells_ids=True) as server:
        for shard in (1, 0):
            options = [f"server={server.url}", "model=tiny", "shards=2", f"shard={shard}"]
            common = [f"prompts={prompts}", f"out={out}", "max_new_tokens=12"]
            regenerate(parse(Config, [*common, *options]))
    files = sorted(out.glob("*.jsonl"))
    assert [f.name for f in files] == ["00000-of-00002.jsonl", "00001-of-00002.jsonl"]
    rows = [row for f in files for row in read(f)]
    assert sorted(row["id"] for row in rows) == [f"p{i}" for i in range(len(ASKED))]
    assert len(load_samples(out, tiny_target).samples) == len(ASKED)


@pytest.mark.slow
def test_two_thousand_prompts_killed_five_times_give_two_thousand_rows(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    """R5, against a real server; kill -9 of the client."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    names = [f"p{i}" for i in range(2000)]
    prompts.write_text("".join(json.dumps({"id": n, "prompt": n}) + "\n" for n in names))
    killer = KILLER.replace("(1, 9, 20, 33, 45)", "(1, 300, 777, 1200, 1800)")
    with serving(tiny_target, tells_ids=True) as server:
        options = [f"server={server.url}", "model=tiny", f"prompts={prompts}", f"out={out}"]
        options += ["max_new_tokens=16", "concurrency=8"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", killer, *options], cwd=ROOT, env=env, check=True)
        assert 1800 <= len(read(out)) < 2000
        regenerate(parse(Config, options))
    assert sorted(row["id"] for row in read(out)) == sorted(names)
