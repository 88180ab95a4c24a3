"""A static (global) corpus on disk: `corpus.safetensors`, mapped read-only when it is used, and
`manifest.json`, which names every source of its text.

Nothing of a live session ever enters such a corpus: it is built before serving, from texts that
somebody has listed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dlite.retrieval import Automaton, Frozen
from dlite.retrieval.base import END, checked
from dlite.retrieval.frozen import FrozenArrays
from dlite.retrieval.suffix_tree import SuffixTree

FORMAT = "dlite-corpus/1"
ARRAYS_FILE, MANIFEST_FILE = "corpus.safetensors", "manifest.json"


@dataclass(frozen=True, slots=True)
class Document:
    """`source` says where the text is from, in words that a reviewer can follow."""

    source: str
    tokens: Sequence[int]
    licence: str = ""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    source: str
    licence: str
    num_tokens: int
    sha256: str  # of the tokens, as little-endian int32


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    tokenizer: str  # the target's tokenizer fingerprint
    num_tokens: int
    sha256: str  # of ARRAYS_FILE
    sources: list[SourceRecord]


def build(
    folder: Path,
    documents: Iterable[Document],
    *,
    tokenizer: str,
    on_document: Callable[[Document], None] | None = None,
) -> Manifest:
    """Each document becomes a segment, so that nothing matches across two of them.

    Raises ValueError without documents, and for one that has no name of its source or no tokens.
    """
    from safetensors.numpy import save_file

    automaton = Automaton()
    records = []
    for document in documents:
        tokens = checked(document.tokens)
        if not document.source or not tokens:
            raise ValueError(
                f"document {len(records)} ({document.source!r}) has {len(tokens)} tokens; each "
                "needs the name of its source and at least one token"
            )
        automaton.extend(tokens)
        automaton.end_segment()
        digest = hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).hexdigest()
        records.append(SourceRecord(document.source, document.licence, len(tokens), digest))
        if on_document:
            on_document(document)
    if not records:
        raise ValueError(f"no documents for the corpus {folder}; give at least one")
    arrays = automaton.freeze()
    automaton.close()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ARRAYS_FILE
    partial = file.with_suffix(".partial")
    save_file(arrays.named(), partial)
    num_tokens = sum(record.num_tokens for record in records)
    manifest = Manifest(FORMAT, tokenizer, num_tokens, _sha256(partial), records)
    partial.chmod(0o444)
    os.replace(partial, file)
    (folder / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError where `folder` holds no corpus of this format."""
    file = folder / MANIFEST_FILE
    try:
        fields = json.loads(file.read_text())
        records = [SourceRecord(**record) for record in fields.pop("sources")]
        manifest = Manifest(sources=records, **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no corpus manifest ({error}); build the corpus") from None
    if manifest.format != FORMAT:
        raise ValueError(f"{file} has format {manifest.format!r}, not {FORMAT!r}; build it again")
    return manifest


def load(folder: Path, *, tokenizer: str | None = None) -> Frozen:
    """Maps the arrays, read-only, after comparing them with the manifest.

    Raises ValueError where file and manifest differ, and for another tokenizer than it was built
    with.
    """
    manifest = read_manifest(folder)
    if tokenizer is not None and tokenizer != manifest.tokenizer:
        raise ValueError(
            f"corpus {folder} was built with tokenizer {manifest.tokenizer}, the target's is "
            f"{tokenizer}; build the corpus with the target's tokenizer"
        )
    file = folder / ARRAYS_FILE
    if not file.is_file() or _sha256(file) != manifest.sha256:
        raise ValueError(f"{file} is not the file that its manifest names; build the corpus again")
    return Frozen(map_arrays(file))


def load_tree(folder: Path, *, tokenizer: str | None = None) -> SuffixTree:
    """The same text in Arctic Inference's suffix tree, which is built anew, in private memory."""
    load(folder, tokenizer=tokenizer)
    text = map_arrays(folder / ARRAYS_FILE).text
    tree = SuffixTree(own_length=True)
    begin = 0
    for end in np.flatnonzero(text == END).tolist():
        tree.extend(text[begin:end])
        tree.end_segment()
        begin = end + 1
    return tree


def map_arrays(file: Path) -> FrozenArrays:
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    header_bytes = int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8 : 8 + header_bytes])
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            size = (end - begin) // 4
            arrays[name] = np.frombuffer(mapped, "<i4", size, 8 + header_bytes + begin)
    return FrozenArrays(**arrays)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
