"""scripts/agents.sh from a file of sessions to its report, in a checkout whose set-up is done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import byte_tokenizer
from session_rows import session_row, write_sessions

REPO = Path(__file__).parents[1]


def checkout(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    shutil.copy(REPO / "scripts/agents.sh", folder / "scripts")
    (folder / "scripts/setup.sh").write_text("exit 0\n")
    (folder / "eval").symlink_to(REPO / "eval")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.mark.slow
def test_agents_sh_ends_before_its_report(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [session_row(f"moat-1/{name}", "eval") for name in "ab"]
    rows += [session_row(f"moat-1/{name}", "global") for name in "cde"]
    sessions = write_sessions(tmp_path / "s.jsonl.gz", *rows)
    out = tmp_path / "out"
    command = ["bash", str(checkout(tmp_path) / "scripts/agents.sh"), sessions]
    command += [str(tmp_path / "tokenizer"), str(out), "limit=1", "seeds=1", "batch=1,3"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        name: {(row["drafter"], row["variant"]) for row in summary["rows"]}
        for name in ("replay", "ablations")
        for summary in [json.loads((out / name / "summary.json").read_text())]
    }
    assert {("hybrid", ""), ("planner", ""), ("agspec", "")} <= found["replay"]
    assert {("agspec", "+global"), ("agentspec", "N"), ("sam", "own")} <= found["ablations"]
    assert (("arctic", "+global") in found["ablations"]) == bool(find_spec("arctic_inference"))
    assert "| agspec:+global |" in (out / "tables.md").read_text()
    page = (out / "report.html").read_text()
    assert page.count("<h2>Replay of") == 2
