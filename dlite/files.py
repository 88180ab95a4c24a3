"""Folders that can be written, and files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def writable(folder: Path, key: str) -> Path:
    """Makes a folder with its parents; `key` names the setting that it comes from. Raises
    ValueError where nothing can be written: at the start, not after hours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make {folder}: {error.strerror}; give another {key}=") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write to {folder}; give another {key}=, or mend its permissions")
    return folder


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
