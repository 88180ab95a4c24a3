"""An interrupted run is the uninterrupted one, to the last bit, whenever and however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from train_worker import ROOT, launch

from dlite.decode import decode
from dlite.target import TargetModel
from dlite.types import Request
from train import run as program
from train.config import check
from train.loop import Fit
from train.record import read_metrics
from train.signals import Interrupted
from train.state import latest


@pytest.fixture(scope="module")
def answers(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = [tiny_target.tokenizer.encode(f"user asks {i} and the dog") for i in range(8)]
    requests = [Request(str(i), prompt, 16) for i, prompt in enumerate(prompts)]
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    with file.open("w") as out:
        for prompt, done in zip(
            prompts, decode(tiny_target, requests, None).completions, strict=True
        ):
            mask = [0] * len(prompt) + [1] * len(done.tokens)
            row = {"id": done.request.id, "input_ids": prompt + done.tokens, "loss_mask": mask}
            out.write(json.dumps(row) + "\n")
    return file


@pytest.fixture
def settings(tiny_folder: Path, answers: Path, tmp_path: Path) -> dict[str, Any]:
    """One stage of ten epochs of three steps (6 samples in batches of 2), saved at each step."""
    return {
        "output": str(tmp_path),
        "target": {"name": str(tiny_folder)},
        "model": {"num_hidden_layers": 1, "num_taps": 3, "draft_vocab_size": 64, "rank": 8},
        "data": {"train": [str(answers)], "eval_samples": 2},
        "optim": {"batch_size": 2, "anchors_per_sample": 4, "learning_rate": 3e-3},
        "stages": [{"name": "only", "loss": {"ce": 1.0, "tv": 0.5}, "epochs": 10}],
        "save_every": 1,
        "eval_every": 4,
        "log_every": 1,
    }


def train(settings: dict[str, Any], name: str, **changes: Any) -> Path:
    merged = OmegaConf.create({**settings, "name": name, **changes})
    program.train(check(merged))  # pyright: ignore[reportArgumentType]
    return Path(settings["output"]) / name


def assert_same_run(ours: Path, theirs: Path) -> None:
    one, two = (load_file(run / "stages" / "only" / "model.safetensors") for run in (ours, theirs))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert timeless(ours) == timeless(theirs)


def timeless(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run)
    return [{k: v for k, v in m.items() if not k.endswith("_per_second")} for m in lines]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    original = Fit.step

    def step(self: Fit, step: int) -> Any:
        if step == number:
            monkeypatch.setattr(Fit, "step", original)
            act()
        return original(self, step)

    monkeypatch.setattr(Fit, "step", step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_sigterm_or_ctrl_c_leaves_a_state_that_resumes_exactly(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int
) -> None:
    """R13. In the middle of an epoch, before its last step (3 steps), and where an evaluation was
    due; nothing would be saved but for the signal."""
    settings |= {"save_every": 1000, "stages": [{**settings["stages"][0], "epochs": 2}]}
    whole = train(settings, "whole")
    before = signal.getsignal(number)
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted) as caught:
        train(settings, "cut")
    assert caught.value.number == number
    assert signal.getsignal(number) is before
    found = latest(whole.parent / "cut" / "state")
    assert found is not None and found[1].step == step + 1
    assert_same_run(train(settings, "cut"), whole)


def test_a_second_ctrl_c_ends_the_run_at_once(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 1, twice)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    try:
        with pytest.raises(KeyboardInterrupt):
            train(settings, "cut")
    finally:
        signal.signal(signal.SIGINT, before)


def test_resume_where_the_stage_had_just_ended_trains_nothing_twice(
    settings: dict[str, Any],
) -> None:
    settings |= {"stages": [{**settings["stages"][0], "epochs": 1}]}
    run = train(settings, "whole")
    before = timeless(run), (run / "state" / "latest").stat().st_mtime_ns
    train(settings, "whole")
    assert (timeless(run), (run / "state" / "latest").stat().st_mtime_ns) == before


def test_resume_from_torn_metrics_and_a_state_that_latest_does_not_name_yet(
    settings: dict[str, Any],
) -> None:
    """A kill between the new folder's move and that of `latest`, and within a line of the log."""
    settings |= {"keep_states": 10, "stages": [{**settings["stages"][0], "epochs": 2}]}
    run = train(settings, "whole")
    copy = run.with_name("cut")
    subprocess.run(["cp", "-r", run, copy], check=True)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("name: whole", "name: cut"))
    (copy / "state" / "latest").write_text("only-0000003")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "only", "st')
    assert_same_run(train(settings, "cut"), run)


def test_the_last_states_and_the_best_draft_are_kept(settings: dict[str, Any]) -> None:
    """R6: states are counted in optimizer steps, here of two micro-batches each."""
    settings["optim"]["micro_batch_size"] = 1
    folder = train(settings, "whole", keep_states=3)
    states = sorted(p.name for p in (folder / "state").iterdir() if p.is_dir())
    assert states == ["only-0000028", "only-0000029", "only-0000030"]

    merged = OmegaConf.create({**settings, "name": "whole"})
    run = program.Run(check(merged))  # pyright: ignore[reportArgumentType]
    stage = run.build(run.config.stages[0])
    kept = []
    for step, tau in ((40, 2.5), (44, 2.1), (48, 2.5), (52, 2.6)):
        run.keep_best(stage, step, tau)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"stage": "only", "step": step, "tau": tau}) + "\n")
        config = json.loads((folder / "best" / "only" / "config.json").read_text())
        kept.append(config["training"]["step"])
    assert kept == [40, 40, 40, 52]


KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
from omegaconf import OmegaConf
from train.config import check
from train.run import train
from train.state import latest

config = check(OmegaConf.create(json.loads(sys.argv[1])))
state = Path(config.output) / config.name / "state"


def half_written(since):
    # what the last kill left behind is older
    try:
        return any(p.stat().st_ctime_ns > since for p in state.glob(".only-*.tmp"))
    except FileNotFoundError:
        return False


moment, torn, steps = random.Random(0), 0, set()
for _ in range(30):
    began = time.time_ns()
    child = os.fork()  # imported once, so that each run starts fast
    if child == 0:
        train(config)
        os._exit(0)
    while not half_written(began):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.0002)
    time.sleep(moment.random() * 0.08)  # a save takes about 30 ms
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    torn += half_written(began)
    if found := latest(state):  # raises where it names a state that is not there
        steps.add(found[1].step)
print(json.dumps([torn, len(steps)]))
"""


@pytest.mark.slow
def test_kill_9_thirty_times_while_saving_still_ends_in_the_same_weights(
    settings: dict[str, Any],
) -> None:
    settings |= {"stages": [{**settings["stages"][0], "epochs": 16}], "keep_states": 1}
    whole = train(settings, "whole")
    command = [sys.executable, "-c", KILLER, json.dumps({**settings, "name": "killed"})]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    torn, states = json.loads(done.stdout.splitlines()[-1])
    print(f"{torn} of 30 kills left a half-written state, {states} states were resumed")
    assert torn > 5 and states > 5
    assert_same_run(train(settings, "killed"), whole)


@pytest.mark.slow
def test_resume_of_two_processes_and_by_another_number_of_them(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """R2, R10: SIGTERM ends a run of two in one state; two resume it bit for bit, one goes on with
    the same global order (its sums are added up in another order)."""
    settings |= {"stages": [{**settings["stages"][0], "epochs": 2}], "save_every": 4}
    worker = [str(Path(__file__).parent / "train_worker.py"), "--run"]
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**settings, "name": name}))
    launch(2, [*worker, str(tmp_path / "whole.json")])
    launch(2, [*worker, str(tmp_path / "cut.json"), "only 1"])  # SIGTERM to rank 1 in step 1
    found = latest(tmp_path / "cut" / "state")
    assert found is not None and found[1].step == 2
    subprocess.run(["cp", "-r", tmp_path / "cut", tmp_path / "alone"], check=True)
    launch(2, [*worker, str(tmp_path / "cut.json")])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    config = tmp_path / "alone" / "config.yaml"
    config.write_text(config.read_text().replace("name: cut", "name: alone"))
    alone = train(settings, "alone")
    losses = [
        [m["loss"] for m in timeless(run) if "loss" in m] for run in (alone, tmp_path / "whole")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
