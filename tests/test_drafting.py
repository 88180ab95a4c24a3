"""The program that times drafting, on small sessions: whole rows, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.drafting import MAKERS, Config, main
from tests.conftest import byte_tokenizer


def test_a_drafter_or_a_batch_size_has_no_row_or_draft_that_was_accepted(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    main(
        Config(
            out=str(tmp_path / "out"),
            text=[str(text)],
            tokenizer=str(tmp_path / "tokenizer"),
            tokens=600,
            corpus=300,
            num_draft=4,
            batch=[1, 3],
            runs=1,
        )
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = summary["rows"]
    assert [(r["drafter"], r["batch"]) for r in rows] == [(d, b) for d in MAKERS for b in (1, 3)]
    assert all(row["propose_microseconds"] > 0 for row in rows)
    assert all(row["accepted"] > 1 for row in rows if row["drafter"] == "survival")
    assert all((row["ratio_to_engine"] is None) == (row["batch"] == 1) for row in rows)


def test_an_impossible_setting_is_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus is 0; give at least 1"):
        Config(out="x", corpus=0)
    with pytest.raises(ValueError, match="drafters has 'sum'; choose from sam,"):
        Config(out="x", drafters=["sum"])
    with pytest.raises(ValueError, match=r"batch is \[0\]; give sizes of at least 1"):
        Config(out="x", batch=[0])
