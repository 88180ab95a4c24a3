"""Target states on disk: one capture, many readers, and never another target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_resume import answers, train  # noqa: F401

import dlite.checkpoint
from train import run as program
from train.config import check
from train.data import anchors
from train.record import read_metrics

STAGES = [
    {"name": "teacher", "context": "taps+history", "loss": {"ce": 1.0}, "epochs": 1},
    {"name": "student", "loss": {"kl": 1.0, "tv": 1.0}, "teacher": "teacher", "epochs": 1},
]


@pytest.fixture
def settings(tiny_folder: Path, answers: Path, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    return {
        "output": str(tmp_path),
        "target": {"name": str(tiny_folder)},
        "model": {"num_hidden_layers": 1, "num_taps": 3, "draft_vocab_size": 64, "rank": 8},
        "data": {
            "train": [str(answers)],
            "eval_samples": 2,
            "states": "cache",
            "cache": str(tmp_path / "deep" / "cache"),
            "cache_dtype": "float32",
        },
        "optim": {"batch_size": 3, "anchors_per_sample": 4, "learning_rate": 3e-3},
        "stages": STAGES,
        "log_every": 1,
    }


def losses(folder: Path) -> list[float]:
    return [
        m[key] for m in read_metrics(folder) for key in ("loss", "tau", "held_out_ce") if key in m
    ]


def test_runs_on_one_cache_train_as_on_live_states_and_capture_once(
    settings: dict[str, Any],
) -> None:
    """M11. A folder that is not there is made, with its parents (D3)."""
    live = train(settings, "live", data={**settings["data"], "states": "live"})
    first = train(settings, "first")
    folder = Path(settings["data"]["cache"])
    written = {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}
    second = train(settings, "second", optim={**settings["optim"], "learning_rate": 1e-3})
    assert {f.name: f.stat().st_mtime_ns for f in folder.iterdir()} == written
    assert losses(first) == pytest.approx(losses(live), rel=1e-4)
    assert losses(second) != pytest.approx(losses(first), rel=1e-4)


def test_a_cache_holds_a_baseline_s_taps_of_every_position(settings: dict[str, Any]) -> None:
    """With the teacher's three layers alone, or the anchors' taps, the others would be NaN."""
    stage = {"name": "dflash", "context": "history", "loss": {"ce": 1.0}, "epochs": 1}
    model = {**settings["model"], "composition": "feature", "head": "none", "tap_ids": [1, 2]}
    changes = {"model": model, "stages": [stage]}
    live = train(settings, "live", data={**settings["data"], "states": "live"}, **changes)
    cached = train(settings, "cached", **changes)
    assert losses(cached) == pytest.approx(losses(live), rel=1e-4)
    assert dlite.checkpoint.read(cached / "stages" / "dflash").config.tap_ids == (1, 2)


def test_epochs_draw_their_anchors_from_those_that_the_cache_kept(
    settings: dict[str, Any],
) -> None:
    data = {**settings["data"], "cache_anchors": 6, "cache_dtype": "bfloat16"}
    merged = OmegaConf.create({**settings, "name": "pool", "data": data})
    run = program.Run(check(merged))  # pyright: ignore[reportArgumentType]
    states = run.cached()
    for sample in run.train:
        kept = states.pool(sample)
        assert len(kept) == 6
        drawn = {a for e in range(30) for a in anchors(sample, 0, e, 4, states.pool(sample))}
        assert drawn == set(kept)
    train(settings, "small", data=data)  # a row that is not there is NaN and would stop it


def test_a_cache_above_the_limit_is_refused_until_it_is_wanted(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = {**settings["data"], "cache_limit_gb": 1e-5}
    with pytest.raises(ValueError, match=r"above data\.cache_limit_gb.*data\.cache_yes=true"):
        train(settings, "refused", data=data)
    assert "8 samples, 0.00 GB" in capsys.readouterr().out
    assert not Path(data["cache"]).exists()
    train(settings, "wanted", data={**data, "cache_yes": True})


def test_a_cache_of_other_contents_is_refused_and_an_unfinished_one_made_anew(
    settings: dict[str, Any],
) -> None:
    train(settings, "first")
    with pytest.raises(ValueError, match=r"was made with another seed;"):
        train(settings, "other", seed=1)
    with pytest.raises(ValueError, match=r"was made with another tap_ids;"):
        train(settings, "taps", model={**settings["model"], "num_taps": 4})
    folder = Path(settings["data"]["cache"])
    (folder / "manifest.json").unlink()
    (folder / "states-00000.safetensors").write_bytes(b"half")
    train(settings, "again")


def test_a_damaged_shard_is_named(settings: dict[str, Any]) -> None:
    train(settings, "first")
    file = Path(settings["data"]["cache"]) / "states-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"states-00000\.safetensors is missing or cut"):
        train(settings, "cut")
    file.write_bytes(b"\xff" * len(whole))
    with pytest.raises(ValueError, match=r"states-00000\.safetensors is damaged"):
        train(settings, "damaged")
