from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from answer_runs import ASKED, by_id, read, run, write_prompts
from conftest import save_tiny_llama

from dlite.config import parse
from dlite.decode import decode
from dlite.target import TargetModel
from dlite.types import Request
from train.answers import AnswerFile
from train.data import load_samples
from train.regenerate import Config, load_prompts, regenerate

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


# The answers


@pytest.mark.parametrize("options", [(), ("drafter=ngram", "batch_size=3"), ("batch_size=1",)])
def test_rows_hold_the_targets_own_ids_whatever_the_batch_and_the_drafter(
    tiny_folder: Path,
    prompts: Path,
    tmp_path: Path,
    tiny_target: TargetModel,
    options: tuple[str, ...],
) -> None:
    rows = by_id(run(tiny_folder, prompts, tmp_path / "out.jsonl", *options))
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
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    thinking = "template_kwargs.enable_thinking=true"
    endless = by_id(run(tiny_folder, prompts, tmp_path / "endless.jsonl", thinking))
    eos_ids = [2, endless["p1"]["answer_ids"][4]]
    folder = save_tiny_llama(tmp_path / "target", eos_token_id=eos_ids)
    rows = by_id(run(folder, prompts, out := tmp_path / "out.jsonl", thinking))
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
    target, kwargs = TargetModel.load(str(folder)), {"enable_thinking": True}
    samples = load_samples(out, target, template_kwargs=kwargs).samples
    for sample in samples:
        row = rows[sample.id]
        prompt = target.render(row["messages"][:-1], **kwargs)
        assert sample.input_ids == prompt + row["answer_ids"]
        assert sample.loss_mask == [i >= len(prompt) for i in range(len(sample.input_ids))]
        assert (row["finish_reason"] == "stop") == (row["answer_ids"][-1] in eos_ids)
    assert "p1" in {sample.id for sample in samples}


def test_rows_without_text_give_the_same_samples(
    tiny_folder: Path, prompts: Path, tmp_path: Path, tiny_target: TargetModel
) -> None:
    run(tiny_folder, prompts, full := tmp_path / "full.jsonl")
    rows = by_id(run(tiny_folder, prompts, bare := tmp_path / "bare.jsonl", "text=false"))
    assert all(row["messages"][-1]["role"] == "user" for row in rows.values())
    assert load_samples(bare, tiny_target).samples == load_samples(full, tiny_target).samples


def test_sampled_answers_depend_on_seed_and_id_not_on_batch_or_interruption(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    first = by_id(run(tiny_folder, prompts, tmp_path / "a.jsonl", "temperature=1"))
    run(tiny_folder, prompts, tmp_path / "b.jsonl", "temperature=1", "limit=2")
    second = by_id(run(tiny_folder, prompts, tmp_path / "b.jsonl", "temperature=1", "batch_size=1"))
    other = by_id(run(tiny_folder, prompts, tmp_path / "c.jsonl", "temperature=1", "seed=1"))
    assert first == second
    assert first != other


# Resuming


def test_rows_there_are_not_answered_again(
    tiny_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    first = run(tiny_folder, prompts, out, "limit=4")
    assert len(first) == 4
    assert run(tiny_folder, prompts, out)[:4] == first
    assert len(read(out)) == len(ASKED)
    before = out.read_bytes()
    run(tiny_folder, prompts, out)
    assert out.read_bytes() == before
    assert "0 answers of 0 tokens" in capsys.readouterr().out


def test_a_torn_last_line_is_dropped_and_answered_again(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    whole = by_id(run(tiny_folder, prompts, out))
    text = out.read_bytes()
    for cut in (len(text) - 1, len(text) - 40, len(text) - len(text.splitlines()[-1]) - 1):
        out.write_bytes(text[:cut])
        assert by_id(rows := run(tiny_folder, prompts, out)) == whole
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
    killed = by_id(read(out))
    assert 45 <= len(killed) < 60
    command = [sys.executable, "-m", "train.regenerate", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert sorted(row["id"] for row in rows) == sorted(names)
    assert f"{60 - len(killed)} answers of" in done.stdout
    assert by_id(rows) == by_id(run(tiny_folder, prompts, tmp_path / "straight.jsonl"))


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
    tiny_folder: Path, prompts: Path, tmp_path: Path, options: tuple[str, ...], named: str
) -> None:
    out = tmp_path / "out.jsonl"
    run(tiny_folder, prompts, out, "limit=2")
    before = out.read_bytes()
    with pytest.raises(ValueError, match="overwrite=true") as caught:
        run(tiny_folder, prompts, out, *options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert out.read_bytes() == before
    assert len(run(tiny_folder, prompts, out, *options, "overwrite=true")) == len(ASKED)
    assert len(run(tiny_folder, prompts, out, *options)) == len(ASKED)


def test_another_targets_rows_are_never_mixed(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    run(tiny_folder, prompts, out := tmp_path / "out.jsonl", "limit=2")
    other = save_tiny_llama(tmp_path / "target", initializer_range=0.3)
    with pytest.raises(ValueError, match=r"was made with weights=\w+, this run has weights="):
        run(other, prompts, out)


def test_answers_without_their_settings_file_are_refused(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run(tiny_folder, prompts, out, "limit=2")
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings\.json, .* is missing"):
        run(tiny_folder, prompts, out)


def test_broken_and_doubled_answer_rows_are_named(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    run(tiny_folder, prompts, out, "limit=2")
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"{\n" + second)
    with pytest.raises(ValueError, match=r"line 1 of .*is no answer row"):
        run(tiny_folder, prompts, out)
    out.write_bytes(first + first)
    with pytest.raises(ValueError, match="two rows of id 'p0'"):
        run(tiny_folder, prompts, out)


def test_two_processes_never_write_one_file(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    settings = {"max_new_tokens": 12}
    file = AnswerFile(out, settings, overwrite=False)
    with pytest.raises(ValueError, match="another process is writing"):
        run(tiny_folder, prompts, out)
    file.close()
    assert len(run(tiny_folder, prompts, out)) == len(ASKED)


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
    tiny_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "fox " * 600}) + "\n")
    rows = run(tiny_folder, prompts, tmp_path / "out.jsonl")
    assert len(rows) == len(ASKED)
    assert "left out: 1 prompt + max_new_tokens exceed the target's 512" in capsys.readouterr().out
    prompts.write_text(json.dumps({"id": "long", "prompt": "fox " * 600}))
    with pytest.raises(ValueError, match="none of 1 prompts got an answer: 1 prompt"):
        run(tiny_folder, prompts, tmp_path / "none.jsonl")


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


def test_an_answer_file_that_cannot_be_made_is_refused_before_anything_is_loaded(
    prompts: Path,
) -> None:
    """D3."""
    options = ["target=no target at all", f"prompts={prompts}", f"out={prompts}/sub/answers.jsonl"]
    with pytest.raises(ValueError, match=r"cannot make .*sub.*give another out="):
        regenerate(parse(Config, options))
