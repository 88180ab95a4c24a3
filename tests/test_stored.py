"""Samples on disk are the samples in memory: the same run, without tokens in a process's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import answers, settings, timeless, train  # noqa: F401

from dlite.config import parse
from dlite.target import TargetModel
from train.counts import check_mask_id, token_counts
from train.data import load_samples
from train.stored import StoredSamples, Tokenize, split, tokenize

Settings = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, answers: Path, tiny_folder: Path) -> Path:  # noqa: F811
    out = tmp_path / "deep" / "tokens"
    tokenize(parse(Tokenize, [f"target={tiny_folder}", f"data={answers}", f"out={out}"]))
    return out


def test_samples_on_disk_are_those_in_memory_and_counted_alike(
    folder: Path,
    answers: Path,  # noqa: F811
    tiny_target: TargetModel,
) -> None:
    """F4: their ends give the lengths."""
    kept, loaded = StoredSamples(folder), load_samples(answers, tiny_target).samples
    assert list(kept) == loaded and kept[-1] == loaded[-1] and kept[1:3] == loaded[1:3]
    assert kept.ends_N[0] == len(loaded[0].input_ids)
    ours, _ = split(kept, 3)
    theirs, _ = split(loaded, 3)
    assert list(ours) == list(theirs)
    assert torch.equal(token_counts(ours, 512), token_counts(theirs, 512))
    with pytest.raises(ValueError, match=r"occurs in .*tokens"):
        check_mask_id(loaded[0].input_ids[0], kept, tiny_target)


def test_a_run_on_them_is_the_run_on_the_rows(
    settings: Settings,  # noqa: F811
    folder: Path,
) -> None:
    settings["stages"] = [{**settings["stages"][0], "epochs": 2}]
    rows = train(settings, "rows")
    kept = train(settings, "kept", data={**settings["data"], "train": [str(folder)]})
    assert timeless(rows) == timeless(kept)


def test_samples_made_otherwise_cut_or_there_already_are_refused(
    settings: Settings,  # noqa: F811
    folder: Path,
    answers: Path,  # noqa: F811
    tiny_folder: Path,
) -> None:
    data = {**settings["data"], "train": [str(folder)], "max_length": 17}
    with pytest.raises(ValueError, match=r"another max_length \(max_length=4096\)"):
        train(settings, "other", data=data)
    with pytest.raises(ValueError, match="holds samples already"):
        tokenize(parse(Tokenize, [f"target={tiny_folder}", f"data={answers}", f"out={folder}"]))
    whole = (folder / "ids").read_bytes()
    (folder / "ids").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="is cut; delete it"):
        StoredSamples(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tokens"] * 4 == len(whole)
