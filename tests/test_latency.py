"""eval.latency: what is timed is a real round, and its table says what was timed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlite.config import parse
from dlite.drafters.neural import NeuralDrafter
from dlite.model.heads import LowRankHead
from dlite.model.masks import Blocks, History
from eval import latency
from eval.shapes import (
    PRESETS,
    HistoryRounds,
    Tables,
    TapsRounds,
    build_model,
    draft_low_rank,
)

TINY, K = PRESETS["tiny"], 5


def random_taps(*shape: int) -> Tensor:
    return torch.randn(*shape, TINY.num_taps, TINY.hidden_size)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", ["dflash", "dspark"])
def test_history_kept_up_round_by_round_drafts_other_tokens_than_the_whole_history(
    shape: str,
) -> None:
    """The timed cache, its positions and its grouped attention against the model's plain form."""
    tables = Tables(TINY, torch.float32, "cpu")
    model = build_model(shape, TINY, 2, K, tables)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rounds = HistoryRounds(model, tables.head_weight_VD, 1, [40])
    features_1SLD = random_taps(1, 40)
    rounds.extend(0, features_1SLD[:, :30])
    for end, num_new in ((34, 4), (35, 1), (40, 5)):
        drafted = rounds.round(end, features_1SLD[:, end - num_new : end], num_new)
        row_A, start_A = torch.tensor([end]), torch.tensor([0])
        history = History(features_1SLD[0, :end], row_A, start_A)
        blocks = Blocks(torch.tensor([0]), features_1SLD[:, end - 1], history)
        assert drafted == model.draft(blocks)[0].tolist()
    assert len(set(drafted[0])) > 1


def test_dlite_is_timed_on_something_else_than_its_drafter_or_keeps_a_state() -> None:
    tables = Tables(TINY, torch.float32, "cpu")
    model = build_model("dlite", TINY, 2, K, tables)
    rounds = TapsRounds(model, 2, [16, 64])
    assert isinstance(rounds.drafter, NeuralDrafter)
    taps_BTLD = random_taps(2, K + 1)
    drafted = rounds.round(16, taps_BTLD, 3)
    anchor_B = torch.tensor([request.prompt[-1] for request in rounds.requests[16]])
    assert drafted == model.draft(Blocks(anchor_B, taps_BTLD[:, 2]))[0].tolist()
    assert rounds.state_bytes(64) == 0


def test_low_rank_head_is_timed_in_another_form_than_it_drafts_in() -> None:
    model = build_model("dlite", TINY, 1, K, Tables(TINY, torch.float32, "cpu"))
    head = model.sequential_head
    assert isinstance(head, LowRankHead)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    blocks = Blocks(torch.tensor([7, 9]), random_taps(2))
    with torch.no_grad():
        h_BKD = model.hidden(blocks)
    drafted = draft_low_rank(h_BKD, blocks.anchor_A, head)
    assert drafted.tolist() == model.draft(blocks)[0].tolist()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latency") / "new"
    sizes = ["preset=tiny", "head_preset=tiny", "num_layers=1", "contexts=64,16,4096"]
    arguments = [f"out={folder}", *sizes, "repeats=3", "rounds=1"]
    latency.main(parse(latency.Config, arguments))
    return folder


def test_rows_of_a_shape_or_a_context_are_missing(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    rows = summary["rows"]
    contexts, shapes = (16, 64, 4096), ("dlite", "dflash", "dspark")
    assert [(r["shape"], r["context"]) for r in rows] == [(s, c) for s in shapes for c in contexts]
    for row in rows:
        shortest = next(r for r in rows if r["shape"] == row["shape"])
        ratio = row["round_seconds"] / shortest["round_seconds"]
        assert row["ratio_to_shortest"] == pytest.approx(ratio)
    assert {"command", "commit", "versions", "device", "config"} <= set(summary)


def test_state_bytes_are_not_those_of_keys_and_values(out: Path) -> None:
    rows = json.loads((out / "summary.json").read_text())["rows"]
    per_position = 2 * TINY.num_key_value_heads * TINY.head_dim * 4
    for row in rows:
        expected = 0 if row["shape"] == "dlite" else row["context"] * per_position
        assert row["state_bytes"] == expected


def test_head_rows_count_other_weights_than_are_read(out: Path) -> None:
    heads = {h["head"]: h for h in json.loads((out / "summary.json").read_text())["head_rows"]}
    v, d, r, k = 512, 64, 8, 7
    assert heads["dlite"]["weight_bytes"] == 4 * k * (v * r + 2 * r * 2 * r + r * (r + d))
    assert heads["dflash"]["weight_bytes"] == 4 * v * d
    assert heads["dspark"]["weight_bytes"] == 4 * (v * d + k * v * 256)
    assert all(h["round_seconds"] > 0 for h in heads.values())


def test_latency_report_needs_another_file(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page) == []
    assert "http" not in page.lower() and page.count("<table>") == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("shapes=dlite,eagle", "'eagle' is unknown; choose from dlite, dflash, dspark"),
        ("preset=qwen", "'qwen' is unknown; choose from tiny, smollm2, qwen3-4b"),
        ("contexts=2,64", "contexts are [2, 64]; give lengths from 4 on"),
        ("num_new=9", "num_new is 9; give 1 to 8"),
        ("dtype=float23", "dtype is 'float23'; give float32"),
        ("context=64", "unknown key 'context'; known keys are"),
    ],
)
def test_a_bad_argument_is_a_crash_or_ignored(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(latency.Config, ["out=x", argument])
    assert "\n" not in str(error.value)
