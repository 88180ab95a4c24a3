"""Draft models on disk: `config.json`, `model.safetensors` and a model card, nothing else.

The target's tokenizer, embeddings and LM head are never stored; fingerprints say which target a
draft model belongs to. Only safetensors is ever read: unpickling a stranger's file runs their code.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlite import history_layouts
from dlite.card import model_card
from dlite.history_export import write_config
from dlite.layouts import authors_config, layout_of, our_config, read_config
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target_record import TargetRecord, check_sizes
from dlite.weights import (
    WEIGHTS,
    cast,
    check_copies,
    check_tensors,
    dtype_name,
    from_history_layout,
    read_tensors,
    to_history_layout,
    without_data,
)

if TYPE_CHECKING:
    from dlite.target import TargetModel

CONFIG, CARD = "config.json", "README.md"
FORMAT = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's `config.json` says. `target` is None where the layout has no such words
    (the authors')."""

    folder: Path
    layout: str
    config: DraftConfig
    target: TargetRecord | None
    training: dict[str, Any]
    dtype: str

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.training["template_kwargs"]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in without_data(self.config).parameters())


# ---- writing ---------------------------------------------------------------------------------


def save(
    model: DraftModel,
    folder: str | Path,
    *,
    target: TargetModel | TargetRecord | None,
    training: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a checkpoint; a kill at any moment leaves the old file or the new one, never a half.

    `training` is the JSON-able summary that the card shows; its `template_kwargs` and `command`
    have a meaning. `target` is None only for imports whose target is unknown. Raises ValueError
    when the model and the target differ in size.
    """
    if target is None or isinstance(target, TargetRecord):
        record = target
    else:
        record = TargetRecord.of(target)
    if record is not None:
        check_sizes(model.config, record)
    config = {
        **our_config(model.config),
        "dtype": dtype_name(dtype),
        "target": None if record is None else asdict(record),
        "template_kwargs": training.get("template_kwargs", {}),
        "training": {k: v for k, v in training.items() if k != "template_kwargs"},
    }
    _write(_tensors(model, dtype), Path(folder), config, model_card(model.config, config))


def export_authors(
    model: DraftModel, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the DLite authors' layout. Raises ValueError for a model that it cannot express."""
    config = authors_config(model.config, dtype_name(dtype))
    _write(_tensors(model, dtype), Path(folder), config, card=None)


def export_history(
    model: DraftModel,
    folder: str | Path,
    layout: str,
    *,
    target: TargetModel | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write one of `history_layouts.LAYOUTS`. Raises ValueError for a model that it cannot express,
    and without the target where its readers need the target's name or copies of its tables."""
    if target is None and layout != "z-lab":
        raise ValueError(
            f"the {layout} layout names its target or holds copies of its tables; add --target"
        )
    verifier = None
    if target is not None:
        check_sizes(model.config, TargetRecord.of(target))
        verifier = (str(target.name), list(target.model.config.architectures or []))
    config = write_config(model.config, layout, dtype_name(dtype), verifier)
    tensors = to_history_layout(_tensors(model, dtype), layout, model.config, target)
    _write(tensors, Path(folder), config, card=None)


def _tensors(model: DraftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    state = model.state_dict()
    return {
        k: cast(state[k], dtype).cpu().contiguous() for k in without_data(model.config).state_dict()
    }


def _write(
    tensors: dict[str, Tensor], folder: Path, config: dict[str, Any], card: str | None
) -> None:
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, partial / WEIGHTS, FORMAT)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if card is not None:
            (partial / CARD).write_text(card)
        if folder.exists():
            for name in (WEIGHTS, CARD, CONFIG):
                if (partial / name).exists():
                    os.replace(partial / name, folder / name)
        else:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---- reading ---------------------------------------------------------------------------------


def read(folder: str | Path, num_target_layers: int | None = None) -> Checkpoint:
    """What a checkpoint (folder or hub id, any layout) says of itself. Raises ValueError.

    `num_target_layers` is read where the layout does not state it (speculators' and DeepSpec's).
    """
    path = fetch(folder)
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} has no {CONFIG}; give the folder of a draft model")
    try:
        raw = json.loads((path / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} is no JSON ({error}); restore it") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path / CONFIG} is no JSON object; restore it")
    record = raw.get("target")
    if record is not None and set(record) != {f.name for f in fields(TargetRecord)}:
        raise ValueError(
            f"{path / CONFIG}: 'target' must have {[f.name for f in fields(TargetRecord)]}, "
            f"has {sorted(record)}; export the checkpoint again"
        )
    return Checkpoint(
        folder=path,
        layout=layout_of(raw),
        config=read_config(raw, num_target_layers),
        target=None if record is None else TargetRecord(**record),
        training={
            **raw.get("training", {}),
            "template_kwargs": raw.get("template_kwargs", {}),
        },
        dtype=raw.get("dtype", raw.get("torch_dtype", "bfloat16")),
    )


def fetch(name: str | Path) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded, its pickles are not."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or str(name).startswith(".") or str(name).count("/") != 1:
        raise ValueError(f"draft model {str(name)!r} is no folder and no hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"draft model {str(name)!r} is no folder, and no hub id that can be fetched: {reason}"
        ) from None


def is_checkpoint(name: str) -> bool:
    """Whether a folder or hub id holds a draft model of any layout."""
    path = Path(name).expanduser() / CONFIG
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, CONFIG))
        except (OSError, ValueError):
            return False
    try:
        layout_of(json.loads(path.read_text()))
    except ValueError:
        return False
    return True


def load(
    folder: str | Path,
    target: TargetModel | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> DraftModel:
    """A draft model of any layout, bound to its target when one is given.

    Device and dtype default to the target's, else to CPU and the file's. Raises ValueError for
    another architecture or tokenizer than it was trained for (with `strict` also for other weights
    of the target), and for missing, extra or misshapen tensors.
    """
    checkpoint = read(folder, target.num_layers if target is not None else None)
    model = assemble(checkpoint, target, strict=strict)
    model.to(
        device=device or (target.device if target is not None else "cpu"),
        dtype=dtype or (target.dtype if target is not None else None),
    )
    return model if target is None else model.bind(target)


def assemble(
    checkpoint: Checkpoint, target: TargetModel | None = None, *, strict: bool = False
) -> DraftModel:
    """The model as its file holds it: on the CPU, in the file's dtype, not bound. `target` must be
    the one that it was trained for, as in `load`; other projects' copies of its tables are
    compared with it."""
    config = checkpoint.config
    if target is not None:
        check_sizes(config, TargetRecord.of(target))
        if checkpoint.target is not None:
            checkpoint.target.check(target, strict=strict)
    stored = tensors = read_tensors(checkpoint.folder)
    theirs = checkpoint.layout in history_layouts.LAYOUTS
    if theirs:
        tensors = from_history_layout(stored)
    model = without_data(config)
    check_tensors(tensors, model.state_dict(), checkpoint.folder)
    if theirs:
        check_copies(stored, config, target)
    model.load_state_dict(tensors, assign=True)
    return model


def import_authors(folder: str | Path, target: TargetModel | None = None) -> DraftModel:
    """`load` for the DLite authors' layout only. Raises ValueError for another one."""
    if (layout := read(folder).layout) != "authors":
        raise ValueError(f"{folder} is in the {layout!r} layout, not in the authors'; use load")
    return load(folder, target)
