"""The files that a session opened, each in the forms in which its agents may write it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePath

import numpy as np

from dlite.drafters.emission import renderings
from dlite.drafters.reader import make_marks
from dlite.retrieval.base import Index
from dlite.types import OpenedFile

Encode = Callable[[str], list[int]]
SECRET_FILES = (
    *(".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx"),
    *("id_rsa*", "id_ed25519*", ".netrc", ".pgpass", ".npmrc", ".pypirc", "*credentials*"),
)
# A form that was tried this often and hardly ever accepted is dropped; both figures not studied.
TRIED_TOKENS, LOWEST_ACCEPTANCE = 512, 0.02


@dataclass(slots=True)
class _Text:
    digest: bytes
    form: str
    tokens: np.ndarray


@dataclass(slots=True)
class _Tally:
    drafted: int = 0
    accepted: int = 0


class Workspace:
    """`version` changes when the index is another one. A file's text is tokenised once."""

    def __init__(
        self,
        make_index: Callable[[], Index],
        encode: Encode,
        forms: Sequence[str],
        secret_files: Sequence[str] = SECRET_FILES,
        max_tokens: int = 2**20,
    ) -> None:
        self._make_index, self._encode, self._secret_files = make_index, encode, secret_files
        self._max_tokens = max_tokens
        self.forms = list(forms)
        self.names = [f"workspace:{form}" for form in forms]  # of drafts, by the form's mark
        self.marks = make_marks()
        self.index: Index | None = None
        self.num_tokens = 0
        self.version = 0
        self._texts: list[_Text] = []
        self._seen: set[bytes] = set()
        self._tallies = {form: _Tally() for form in forms}

    def open(self, file: OpenedFile) -> None:
        """Files whose name says that they hold secrets are left out."""
        name = PurePath(file.path).name
        digest = hashlib.sha256(f"{file.path}\0{file.text}".encode(errors="replace")).digest()
        if digest in self._seen or any(fnmatch(name, pattern) for pattern in self._secret_files):
            return
        self._seen.add(digest)
        for form, text in renderings(file.text, self.forms):
            tokens = np.array(self._encode(text), dtype=np.int32)
            if 0 < len(tokens) <= self._max_tokens // 2:
                self._texts.append(_Text(digest, form, tokens))
                self._write(self._texts[-1])
        if self.num_tokens > self._max_tokens:
            self._keep_newest(self._max_tokens // 2)

    def _write(self, text: _Text) -> None:
        if self.index is None:
            self.index = self._make_index()
            self.version += 1
        self.marks.mark(len(self.index), self.names.index(f"workspace:{text.form}"))
        self.index.extend(text.tokens)
        self.index.end_segment()
        self.num_tokens += len(text.tokens)

    def name_at(self, position: int) -> str:
        """Of a draft that was found there; -1: the engine doesn't say where that was."""
        return self.names[self.marks.at(position)] if position >= 0 else "workspace"

    def record(self, form: str, drafted: int, accepted: int) -> None:
        """Counts a verified draft; a form that never pays is no longer searched."""
        if form not in self.forms:  # dropped while this draft was on its way
            return
        tally = self._tallies[form]
        tally.drafted += drafted
        tally.accepted += accepted
        if tally.drafted >= TRIED_TOKENS and (tally.accepted < LOWEST_ACCEPTANCE * tally.drafted):
            self.forms.remove(form)
            self._rebuild([text for text in self._texts if text.form != form])

    def _keep_newest(self, num_tokens: int) -> None:
        kept: list[_Text] = []
        for text in reversed(self._texts):
            num_tokens -= len(text.tokens)
            if num_tokens < 0:
                break
            kept.append(text)
        self._seen = {text.digest for text in kept}
        self._rebuild(kept[::-1])

    def _rebuild(self, kept: list[_Text]) -> None:
        held = {id(text) for text in kept}
        for text in self._texts:
            if id(text) not in held:
                text.tokens.fill(0)
        if self.index is not None:
            self.index.close()
        self.index, self.num_tokens = None, 0
        self.version += 1
        self._texts, self.marks = kept, make_marks()
        for text in kept:
            self._write(text)

    def close(self) -> None:
        self._rebuild([])
        self._seen.clear()
