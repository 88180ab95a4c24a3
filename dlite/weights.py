"""Tensors of draft models: which there are, reading them from safetensors, starting from others."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.vocab import draft_to_target

if TYPE_CHECKING:
    from dlite.target import TargetModel

WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# What a student leaves behind when it starts from its history-aware teacher.
HISTORY_ONLY = ("history_fuse.", "history_norm.")
# What `dlite.history_layouts` call otherwise, and what their files hold of the target's.
RENAMED = {
    "fc.": "feature_fuse.",
    "hidden_norm.": "context_norm.",
    "markov_head.": "sequential_head.",
}
COPIES = {"embed_tokens.weight", "lm_head.weight"}
MAY_DIFFER = {"context", "history_sinks", "history_window", "max_position_embeddings"}


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


# ---- other projects' names -------------------------------------------------------------------


def _rename(tensors: dict[str, Tensor], prefixes: dict[str, str]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        named[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    return named


def from_history_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names. Copies of what the target owns are left out (see
    `check_copies`), and so is a confidence head, with a warning."""
    own = {k: t for k, t in tensors.items() if not k.startswith("confidence_head.")}
    if len(own) < len(tensors):
        warnings.warn(
            "the confidence head is left out: dlite does not shorten drafts by it, so the target "
            "verifies all tokens of each draft; output is the same",
            stacklevel=2,
        )
    return _rename({k: t for k, t in own.items() if k not in COPIES}, RENAMED)


def check_copies(
    tensors: dict[str, Tensor], config: DraftConfig, target: TargetModel | None
) -> None:
    """Warns of a checkpoint's copies of the target's tables that differ from the target's own, or
    can't be compared. Raises ValueError for another shape than the target's, and for a target that
    scales its embeddings: these layouts' readers don't."""
    if target is not None:
        mask_1 = torch.tensor([config.mask_token_id], device=target.device)
        if not torch.equal(target.embed(mask_1), target.embed_weight_VD[mask_1]):
            raise ValueError(
                f"the target {target.name!r} scales its input embeddings, which DFlash and DSpark "
                "read unscaled; only a target that does not can be drafted for"
            )
    copies = {name: tensors[name] for name in sorted(COPIES & tensors.keys())}
    for name, copy_VD in copies.items():
        num_ids = config.num_draft_ids if name == "lm_head.weight" else config.vocab_size
        if copy_VD.shape != (num_ids, config.hidden_size):
            raise ValueError(
                f"{name} has shape {list(copy_VD.shape)}, not the target's "
                f"{[num_ids, config.hidden_size]}; export the checkpoint again"
            )
        if target is None:
            continue
        own_VD = target_table(name, config, target, tensors.get("d2t"))
        if not torch.equal(copy_VD.to(own_VD.dtype), own_VD):
            warnings.warn(
                f"{name} differs from the target's and is left out: dlite drafts with the "
                "target's own, so fewer drafts may be accepted; output is the same",
                stacklevel=2,
            )
    if copies and target is None:
        warnings.warn(
            f"{' and '.join(copies)} are left out, not compared with the target's own that dlite "
            "drafts with: where they differ, fewer drafts are accepted; name the target to compare",
            stacklevel=2,
        )


def target_table(name: str, config: DraftConfig, target: TargetModel, d2t: Tensor | None) -> Tensor:
    """The target's own tensor, on the CPU, for one of COPIES; of a pruned LM head the kept rows."""
    if name == "embed_tokens.weight":
        return target.embed_weight_VD.detach().cpu()
    head_VD = target.head_weight_VD.detach().cpu()
    if not config.pruned:
        return head_VD
    assert d2t is not None
    return head_VD[draft_to_target(d2t.cpu())]


def to_history_layout(
    tensors: dict[str, Tensor], layout: str, config: DraftConfig, target: TargetModel | None
) -> dict[str, Tensor]:
    """Their names, and the copies of the target's tables that a layout's readers need."""
    own = dict(tensors)
    copies = {"deepspec": sorted(COPIES)}.get(layout, ["lm_head.weight"] if config.pruned else [])
    dtype = own["norm.weight"].dtype
    for name in copies:
        assert target is not None
        own[name] = target_table(name, config, target, own.get("d2t")).to(dtype).clone()
    return _rename(own, {ours: theirs for theirs, ours in RENAMED.items()})
