"""The speed program on small sessions: that its rows are whole, and its refusals."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dlite.retrieval import NATIVE
from eval.engines import Config, Row, compare, main
from tests.conftest import byte_tokenizer

FIGURES = {
    "build_tokens_per_second",
    "extend_microseconds",
    "draft_microseconds",
    "bytes_per_token",
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_every_engine_has_a_row_of_positive_figures(tmp_path: Path, tokenizer: str) -> None:
    main(
        Config(
            out=str(tmp_path / "out"),
            text=[__file__],
            tokenizer=tokenizer,
            tokens=500,
            num_draft=4,
            batch=2,
            runs=2,
        )
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = {row["engine"]: row for row in summary["rows"]}
    expected = {"automaton (Python)", "chain (Python)"}
    expected |= {"automaton", "chain"} if NATIVE else set()
    expected |= {"arctic"} if find_spec("arctic_inference") else set()
    assert rows.keys() == expected
    assert all(row[name] > 0 for row in rows.values() for name in FIGURES)
    assert not NATIVE or rows["automaton"]["batch_microseconds"] > 0
    assert summary["provenance"]["command"] and summary["config"]["tokens"] == 500


def test_a_ratio_above_one_is_always_the_better_side() -> None:
    ours = Row("automaton", 100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    arctic = Row("arctic", 50.0, 2.0, 6.0, None, None, 10.0, 6.0, 14.0, 80.0)
    compare([ours, arctic])
    assert ours.ratios_to_arctic == {
        "build_tokens_per_second": 2.0,
        "extend_microseconds": 2.0,
        "draft_microseconds": 3.0,
        "bytes_per_token": 2.0,
        "allocated_bytes_per_token": 1.0,
        "constant_milliseconds": 2.0,
        "free_milliseconds": 10.0,
    }
    assert not arctic.ratios_to_arctic


def test_too_little_text_and_no_text_are_refused(tmp_path: Path, tokenizer: str) -> None:
    options: dict[str, Any] = {"out": str(tmp_path), "tokenizer": tokenizer}
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(ValueError, match=r"a session needs \d+; give more files in text="):
        main(Config(**options, text=[str(short)]))
    with pytest.raises(ValueError, match="which is no file or folder"):
        main(Config(**options, text=[str(tmp_path / "none")]))
    with pytest.raises(ValueError, match="runs is 0; give at least 1"):
        Config(**options, runs=0)
