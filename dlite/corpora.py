"""`dlite corpus build`: static corpora from text, conversations and sessions.

A corpus is public to every session that is served with it (acceptance tells whether a guess is in
it), so the manifest names each document and its licence for a reviewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from dlite.fingerprint import tokenizer_fingerprint
from dlite.loading import load_tokenizer
from dlite.retrieval.corpus import Document, Manifest, build


class Text(NamedTuple):
    source: str
    text: str
    licence: str


def read_texts(paths: Sequence[Path], licence: str) -> Iterator[Text]:
    """Of files, and of all files below folders. A line of a .jsonl file is a document:
    `{"text", "source", "licence"}`, or `{"messages": [...]}`, of which what the assistant wrote
    is taken.

    Raises ValueError for a path that isn't there, a file that is no text, a line of other content.
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; name text files, .jsonl files or folders")
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                content = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{file} is no UTF-8 text; leave it out") from None
            if file.suffix != ".jsonl":
                if content.strip():
                    yield Text(str(file), content, licence)
                continue
            for number, line in enumerate(content.split("\n"), 1):
                if line.strip():
                    yield _row(line, f"{file}:{number}", licence)


def _row(line: str, where: str, licence: str) -> Text:
    try:
        row: Any = json.loads(line)
        text = row["text"] if "text" in row else _written(row["messages"])
        found = [row.get("source", where), text, row.get("licence", licence)]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = []
    if not all(isinstance(part, str) for part in found) or not all(found[:2] or [""]):
        raise ValueError(f'{where} holds no document; give {{"text": ...}} or {{"messages": ...}}')
    return Text(*found)


def _written(messages: list[dict[str, Any]]) -> str:
    return "\n".join(m["content"] for m in messages if m["role"] == "assistant" and m["content"])


def build_corpus(out: Path, tokenizer: str, paths: Sequence[Path], licence: str) -> Manifest:
    """Tokenises the documents and writes the corpus; `tokenizer` is a target's name, or a folder
    with tokenizer.json."""
    loaded = load_tokenizer(tokenizer)

    def documents() -> Iterator[Document]:
        read = tqdm(read_texts(paths, licence), "documents", disable=None)
        for source, text, its_licence in read:
            ids = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
            if loaded.eos_token_id is not None:
                ids.append(loaded.eos_token_id)  # what a model emits behind it
            yield Document(source, ids, its_licence)

    return build(out, documents(), tokenizer=tokenizer_fingerprint(loaded))
