"""The programs over recorded sessions, from files to result files."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import byte_tokenizer
from session_rows import session_row, write_sessions

from dlite.config import parse
from dlite.drafters.length import Caps
from dlite.retrieval import Rule
from dlite.retrieval.corpus import load
from dlite.survival import Prior
from eval import agents_summary, bars, lineup, profile, report, simulate

ROW_KEYS = {
    "drafter",
    "variant",
    "batch",
    "accept_length",
    "tokens_per_step",
    "rejection_rate",
    "goodput_vs_plain",
    "draft_microseconds_per_step",
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sessions")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    rows = [session_row(f"moat-1/{name}", "eval") for name in "ab"]
    rows += [session_row(f"moat-1/{name}", "global") for name in "cdefg"]
    name = write_sessions(folder / "s.jsonl.gz", *rows)
    return [f"sessions={name}", f"tokenizer={folder / 'tokenizer'}", f"cache={folder / 'cache'}"]


@pytest.fixture(scope="module")
def profiled(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile")
    profile.main(parse(profile.Config, [*given, f"out={out}"]))
    return out


def run(given: list[str], out: Path, *more: str) -> dict[str, Any]:
    simulate.main(parse(simulate.Config, [*given, f"out={out}", *more]))
    return json.loads((out / "summary.json").read_text())


def test_a_profile_can_not_be_read_by_those_it_is_for(profiled: Path) -> None:
    cursor = load(profiled / "corpus").cursor()
    cursor.extend(byte_tokenizer().encode("You are"))
    assert cursor.find(Rule.VOTE, 4).match_length > 0
    assert Caps.load(str(profiled / "caps-0.3.json")).of("coder") > 0
    Prior.read(profiled / "survival.json")


def test_a_session_finds_its_own_text_in_the_profiles_corpus(
    given: list[str], tmp_path: Path
) -> None:
    """Five sessions of one task: no half has another to look into, so nothing is global."""
    rows = [session_row(f"moat-1/{name}", "global") | {"task_id": "one"} for name in "ab"]
    name = write_sessions(tmp_path / "one.jsonl", *rows)
    profile.main(parse(profile.Config, [f"sessions={name}", *given[1:], f"out={tmp_path / 'p'}"]))
    counts = json.loads((tmp_path / "p/survival.json").read_text())["counts"]
    assert counts and not any(cell.startswith("GLOBAL") for cell in counts)


def test_every_drafter_of_the_lineup_replays(
    given: list[str], profiled: Path, tmp_path: Path
) -> None:
    left_out = {"static", "threshold"}
    if not find_spec("arctic_inference"):
        left_out |= {"suffix", "arctic"}
    specs = lineup.expand([f"{name}:*" for name in lineup.LINEUP if name not in left_out])
    specs += lineup.expand(["static:*"])[:2] + lineup.expand(["threshold:*"])[:2]
    summary = run(
        given, tmp_path, f"drafter={','.join(specs)}", "split=eval", f"profile={profiled}"
    )
    assert [row.keys() for row in summary["rows"]] == [ROW_KEYS] * len(specs)
    assert {field.name for field in fields(simulate.Row)} == ROW_KEYS
    for row in summary["rows"]:
        assert row["tokens_per_step"] >= 1
    whole = [g for g in summary["groups"] if g["by"] == "all"]
    num_tokens = summary["num_tokens"] - summary["num_calls"]
    assert {group["num_tokens"] for group in whole} == {num_tokens}
    page = (tmp_path / "report.html").read_text()
    assert "moat-1" in page and page.count("<img") == 5


def test_seeds_and_batches_are_not_pooled(given: list[str], profiled: Path, tmp_path: Path) -> None:
    more = ("drafter=sam,hybrid", "batch=1,3", "seeds=2", "split=eval", f"profile={profiled}")
    summary = run(given, tmp_path, *more)
    assert [(r["drafter"], r["batch"]) for r in summary["rows"]] == [
        ("sam", 1),
        ("sam", 3),
        ("hybrid", 1),
        ("hybrid", 3),
    ]
    assert [len(seeds) for seeds in summary["goodput_by_seed"]] == [2] * 4
    report.main(report.Config(inputs=[str(tmp_path)], out=str(tmp_path / "again.html")))
    figures = bars.Figures([summary])
    assert figures.tau("sam") >= 1 and figures.goodput("hybrid", 3) > 0
    kept = agents_summary.gather([summary, summary])
    goodputs = kept["drafters"]["hybrid"]["goodput_by_seed"]
    assert goodputs["3"] == pytest.approx(summary["goodput_by_seed"][3], abs=1e-4)
    page = agents_summary.tables(kept)
    assert f"| sam | {round(figures.tau('sam'), 4):.2f} (" in page and "(2 seeds)" in page
    with pytest.raises(ValueError, match="inputs are of different sessions"):
        agents_summary.gather([summary, summary | {"sessions_sha256": "0"}])


def test_bars_are_met_without_figures(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(given, tmp_path, "drafter=sam,sam:own,sam:session,agspec:+session", "split=eval")
    with pytest.raises(SystemExit):  # the known figures are those of other sessions
        bars.main(bars.Config(inputs=[str(tmp_path)]))
    printed = capsys.readouterr().out
    assert "session / own output" in printed and "missing" in printed and "NOT MET" in printed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["drafter=sma"], "unknown drafter 'sma'; choose from ngram, "),
        (["drafter=agspec"], "corpus is missing; add profile=DIR"),
        (["batch=0"], "batch is"),
        (["seeds=0"], "seeds is 0"),
        (["split=test"], "no session with split 'test'"),
        (["structure=x"], "structure"),
    ],
)
def test_a_wrong_value_is_replayed(
    given: list[str], tmp_path: Path, more: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        run(given, tmp_path, *more)
