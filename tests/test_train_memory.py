"""Memory that does not grow with the vocabulary or the length, and a plan that knows it before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import save_tiny_llama
from train_worker import ROOT

from dlite.model.config import DraftConfig
from train.estimate import Load, saved_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
GIB = 2**30


def measured(*arguments: str) -> int:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # One arena, and big blocks given back: else the peak is glibc's, not ours.
    env |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    env |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # huge pages: half the time
    command = [sys.executable, str(ROOT / "tests" / "memory_worker.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "limit"), [(151_936, 0.5), (262_144, 0.8)])
def test_a_step_holds_no_logits_of_all_positions(vocab_size: int, limit: float) -> None:
    """M3, M4: eager float32 logits alone would take 2.0 and 3.5 GiB. With a 32K-token sample."""
    peak = measured("step", str(vocab_size), "32768")
    print(f"V = {vocab_size}: {peak / GIB:.2f} GiB above weights, gradients and moments")
    assert peak < limit * GIB


def config(**changes: Any) -> DraftConfig:
    sizes: dict[str, Any] = {
        "tap_ids": (0, 3, 5),
        "num_target_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
    }
    return DraftConfig(**{**sizes, **changes})


def test_a_students_memory_goes_by_anchors_and_a_teachers_by_length_too() -> None:
    """L6."""
    short, long = Load(1024, 64, 1024), Load(32768, 64, 32768)
    student, teacher = config(), config(context="taps+history")
    assert saved_bytes(student, long, 4) == saved_bytes(student, short, 4)
    assert saved_bytes(student, replace(short, anchors=128), 4) == pytest.approx(
        2 * saved_bytes(student, short, 4), rel=0.05
    )
    assert saved_bytes(teacher, long, 4) > 2 * saved_bytes(teacher, short, 4)


def test_checkpointing_keeps_a_fraction_of_the_activations() -> None:
    load, deep = Load(512, 64, 512), config(num_hidden_layers=5)
    assert saved_bytes(deep, load, 4, checkpointing=True) < saved_bytes(deep, load, 4) / 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["teacher", "student"])
def test_the_plan_is_within_a_fifth_of_the_measured_peak(tmp_path: Path, stage: str) -> None:
    """M1."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
    target = save_tiny_llama(tmp_path / "target", vocab_size=16000, **sizes)
    rows = tmp_path / "rows.jsonl"
    ids = [3 + i % 400 for i in range(420)]
    row = {"input_ids": ids, "loss_mask": [int(t > 20) for t in range(len(ids))]}
    rows.write_text("".join(json.dumps({"id": i, **row}) + "\n" for i in range(9)))
    context = "taps+history" if stage == "teacher" else "taps"
    settings: dict[str, Any] = {
        "name": stage,
        "output": str(tmp_path),
        "target": {"name": str(target)},
        "model": {"num_hidden_layers": 2, "num_taps": 4, "rank": 64},
        "data": {"train": [str(rows)], "eval_samples": 1},
        "optim": {"batch_size": 4, "anchors_per_sample": 200},
        "stages": [{"name": stage, "context": context, "loss": {"ce": 1.0, "tv": 1.0}}],
    }
    settings["stages"][0]["max_steps"] = 2
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({**settings, "run": "plan"}))
    measured("run", str(file))
    plan = json.loads((tmp_path / stage / "plan.json").read_text())["peak_memory_bytes"]
    file.write_text(json.dumps(settings))
    peak = measured("run", str(file))
    print(f"{stage}: planned {plan / GIB:.2f} GiB, measured {peak / GIB:.2f} GiB")
    assert plan == pytest.approx(peak, rel=0.2)
