"""Tensors of draft models: which there are, reading them from safetensors, starting from others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.vocab import draft_to_target

WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# What a student leaves behind when it starts from its history-aware teacher.
HISTORY_ONLY = ("history_fuse.", "history_norm.")
MAY_DIFFER = {"context", "history_window", "max_position_embeddings"}


def without_data(config: DraftConfig) -> DraftModel:
    """The model on the meta device: names and shapes alone. What the target owns is not in it."""
    with torch.device("meta"):
        return DraftModel(config)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    files, index = [folder / WEIGHTS], folder / f"{WEIGHTS}.index.json"
    if not files[0].exists() and index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
            found = f", only {pickles[0]}: pickles run code and are never read" if pickles else ""
            raise ValueError(
                f"{folder} has no {file.name}{found}; convert the weights on a machine that "
                "trusts their author with safetensors.torch.save_file"
            )
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    # A copy: mapped memory would follow, or crash on, a file written in place.
                    tensors[name] = opened.get_tensor(name).clone()
        except SafetensorError as error:
            raise ValueError(
                f"{file} is no whole safetensors file ({error}); a pickle under that name is not "
                "read either: write it with safetensors.torch.save_file, or fetch it again"
            ) from None
    return tensors


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [
        f"unexpected {name}" + (" (biases are not supported)" if name.endswith(".bias") else "")
        for name in sorted(tensors.keys() - expected.keys())
    ]
    for name in sorted(expected.keys() & tensors.keys()):
        have, want = tensors[name], expected[name]
        if have.shape != want.shape:
            problems.append(f"{name} has shape {list(have.shape)}, not {list(want.shape)}")
        elif have.is_floating_point() != want.is_floating_point():
            problems.append(f"{name} is {dtype_name(have.dtype)}, not {dtype_name(want.dtype)}")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"the weights of {folder} do not fit its config.json: {'; '.join(problems[:4])}{more}; "
            "export the checkpoint again"
        )
    if "d2t" in expected:
        ids = draft_to_target(tensors["d2t"])
        if ids.tolist() != tensors["t2d"].nonzero().squeeze(-1).tolist():
            raise ValueError(f"d2t and t2d of {folder} disagree; export the checkpoint again")


@torch.no_grad()
def warm_start(model: DraftModel, source: DraftModel) -> list[str]:
    """Copy the weights of `source` (a teacher, or an earlier stage); return the names left behind.

    Only a teacher's history branch may be left behind. Raises ValueError, naming the setting or
    the tensors, when the two models differ in anything else.
    """
    ours, theirs = model.config.to_dict(), source.config.to_dict()
    for name, value in ours.items():
        if name not in MAY_DIFFER and value != theirs[name]:
            raise ValueError(
                f"{name} is {value} in the configuration but {theirs[name]} in the model to start "
                "from; remove the setting, or start from random weights"
            )
    own, given = model.state_dict(), source.state_dict()
    missing = sorted(own.keys() - given.keys())
    left = sorted(given.keys() - own.keys())
    if missing or any(not name.startswith(HISTORY_ONLY) for name in left):
        raise ValueError(
            f"the model to start from lacks {missing} and has {left} besides; only a teacher's "
            "history branch may be left behind"
        )
    for name, tensor in own.items():
        tensor.copy_(given[name])
    return left
