"""`dlite serve`: the command it runs, what it refuses, and what inspect says of the plugin."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlite import vllm_plugin
from dlite.cli import main
from dlite.serve import command, servable
from dlite.target import TargetModel
from dlite.vllm_plugin.options import Options
from dlite.vllm_plugin.taps import decision_rows, vllm_layer_ids


def test_the_printed_command_holds_all_that_vllm_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "org/model", "--drafter", "ngram", "--dry-run", "--seed", "3"]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert line[0] == sys.executable
    flags = dict(itertools.pairwise(line))
    assert flags["--model"] == "org/model"
    assert flags["--worker-cls"] == "dlite.vllm_plugin.worker.Worker"
    assert json.loads(flags["--speculative-config"]) == {
        "method": "custom_class",
        "model": "dlite.vllm_plugin.proposer.Proposer",
        "num_speculative_tokens": 7,
    }
    assert json.loads(flags["--additional-config"]) == {"dlite": {"drafters": ["ngram"]}}
    assert flags["--middleware"] == "dlite.vllm_plugin.middleware.Tenants"
    assert line[-2:] == ["--seed", "3"]


def test_options_of_drafters_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["serve", "t", "--drafter", "sam,ngram", "--dry-run", "--option"]
    assert main([*line, "ngram.max_n=4"]) == 0
    flags = dict(itertools.pairwise(shlex.split(capsys.readouterr().out)))
    assert json.loads(flags["--additional-config"])["dlite"]["settings"] == {
        "ngram": {"max_n": "4"}
    }
    assert main([*line, "agspec.corpus=x"]) == 2
    assert "write DRAFTER.KEY=VALUE, of sam, ngram" in capsys.readouterr().err


def test_a_flag_of_vllms_is_still_an_error_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "somewhere", "--seed", "3"])
    assert "unrecognized arguments: --seed 3" in capsys.readouterr().err


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(ValueError, match="drafter hybrid needs a draft model; give --draft DIR"):
        command("t", ["sam", "hybrid"], None, num_draft=7)


@pytest.mark.parametrize(
    ("version", "live"),
    [("0.32.0", True), ("0.32.4+cpu", True), ("0.31.9", False), ("0.33.0", False)],
)
def test_other_versions_are_refused_by_name(
    version: str, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_plugin, "vllm_version", lambda: version)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert (vllm_plugin.status() == f"live with vLLM {version}") == live
    if not live:
        with pytest.raises(ValueError, match=rf"vLLM 0\.32 .* {version} is installed"):
            vllm_plugin.check_version()


def test_a_plugin_that_vllm_would_skip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    assert vllm_plugin.status() == "off: VLLM_PLUGINS=lora,other leaves it out; add dlite"
    monkeypatch.setattr(vllm_plugin, "vllm_version", lambda: None)
    assert vllm_plugin.status() == "off: vLLM is not installed"


def test_an_unknown_option_is_an_error() -> None:
    config = SimpleNamespace(additional_config={"dlite": {"drafter": ["ngram"]}})
    with pytest.raises(ValueError, match="unknown option 'drafter' of dlite; known are"):
        Options.of(config)


def test_layer_ids_of_both_kinds() -> None:
    """Our last layer is read after the final norm: vLLM's state of that id is not."""
    assert vllm_layer_ids((0, 1, 15, 29), 30) == (1, 2, 16)


def test_the_row_before_the_anchor() -> None:
    """Three requests: 3 of 5 drafts accepted; plain decoding; a prompt's part."""
    rows = decision_rows([0, 6, 7, 20], num_verified=[5, 0, 0], num_sampled=[4, 1, 0])
    assert rows == [3, 6, -1]


def test_weights_from_a_gguf_are_written_once_and_are_the_same(
    smollm2: TargetModel, tmp_path: Path
) -> None:
    folder = servable("smollm2-135m", tmp_path)
    written = TargetModel.load(folder)
    assert written.fingerprint() == smollm2.fingerprint()
    changed = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert servable("smollm2-135m", tmp_path) == folder
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == changed
