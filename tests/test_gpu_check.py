"""The GPU script, with tiny sizes on CPU: it must not rot between two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = ("hydra", "omegaconf", "datasets", "dlite.retrieval._native", "deepspeed", "wandb")


@pytest.mark.slow
def test_the_gpu_script_runs_with_the_few_packages_that_it_asks_for(tmp_path: Path) -> None:
    """Neither Hydra, datasets nor the native extension may be needed."""
    hidden = "\n".join(f"sys.modules[{name!r}] = None" for name in ABSENT)
    code = f"import runpy, sys\n{hidden}\nrunpy.run_module('gpu_check', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--tiny"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(check["ok"] for check in found["correctness"])
    (training,) = found["training"]
    assert [s["stage"] for s in training["stages"]] == ["teacher", "stable"]
    assert {r["shape"] for r in found["drafting"]} == {"dlite", "dflash", "dspark", "eagle3"}
    assert all(row["seconds"] > 0 for row in found["drafting"])
    assert set(found["verification"][0]["seconds_by_tokens"]) == {"1", "8"}
