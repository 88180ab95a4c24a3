"""A tokenizer without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlite.loading import locate


def load_tokenizer(name: str) -> Any:
    """The `tokenizers.Tokenizer` of a folder with tokenizer.json, or of a target by its name.

    Raises ValueError where neither is found.
    """
    from tokenizers import Tokenizer

    if (Path(name) / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
    return load_chat_tokenizer(name).backend_tokenizer


def load_chat_tokenizer(name: str) -> Any:
    """The same with its chat template, as `transformers` loads it.

    Raises ValueError where none is found.
    """
    from transformers import AutoTokenizer

    alone = (Path(name) / "tokenizer.json").is_file()
    source, gguf_file = (name, None) if alone else locate(name)
    try:
        return AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"tokenizer of {name!r} can't be loaded: {reason}") from None
