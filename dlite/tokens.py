"""Which bytes a token stands for, read once from the tokenizer's own description.

Decoding single ids would lie: half a character comes back as U+FFFD, leading spaces go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Normalised (NFC) text with what tokenizers stumble over: characters of one to four bytes, joined
# emoji, a NUL, both line ends, tabs and runs of spaces.
PROBE = (
    "def f(x):\n\treturn 'ü' + \"é\"\r\n    数据 한국어 👩‍💻 🙂𝄞 \x00\\ `$$` </a>  <b>\n\n1234.5"
)
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenKind(IntEnum):
    TEXT = 0
    ADDED = 1  # added to the vocabulary, but text all the same: Qwen3's <think>
    SPECIAL = 2  # added, and no text: <|im_end|>
    HOLE = 3  # an id without a token: vocabulary padding
    UNDECODABLE = 4


@dataclass(frozen=True, slots=True, eq=False)
class TokenBytes:
    """Bytes of id i: `blob[offsets[i] : offsets[i + 1]]`. Ids outside the table are holes."""

    blob: bytes
    offsets: NDArray[np.int32]  # [ids + 1]
    kinds: bytes  # TokenKind per id
    strips_first_space: bool = False  # decoding drops the space that encoding has put first

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, token: int) -> bytes:
        if not 0 <= token < len(self.kinds):
            return b""
        return self.blob[self.offsets[token] : self.offsets[token + 1]]

    def kind(self, token: int) -> TokenKind:
        return TokenKind(self.kinds[token] if 0 <= token < len(self.kinds) else TokenKind.HOLE)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Of a whole sequence, from its first token on."""
        data = b"".join(self[token] for token in tokens)
        return data.removeprefix(b" ") if self.strips_first_space else data

    @classmethod
    def of(cls, entries: Mapping[int, tuple[bytes, TokenKind]], num_ids: int) -> TokenBytes:
        hole = (b"", TokenKind.HOLE)
        rows = [entries.get(token, hole) for token in range(num_ids)]
        offsets = list(accumulate((len(data) for data, _ in rows), initial=0))
        return cls(
            blob=b"".join(data for data, _ in rows),
            offsets=np.array(offsets, dtype=np.int32),
            kinds=bytes(kind for _, kind in rows),
        )


def token_bytes(tokenizer: Any, num_ids: int | None = None) -> TokenBytes:
    """For a fast Hugging Face tokenizer, or a `tokenizers.Tokenizer`: byte-level BPE, or
    SentencePiece pieces with byte fallback. `num_ids`: rows of the LM head, where there are more.

    Raises ValueError where the tokenizer is of another kind, and where encoding a probe text and
    joining the bytes of its tokens does not give that text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokenizer.json to read; load a fast tokenizer"
        )
    spec = json.loads(backend.to_str())
    entries = dict(_vocabulary(spec))
    for added in spec["added_tokens"]:
        kind = TokenKind.SPECIAL if added["special"] else TokenKind.ADDED
        entries[added["id"]] = (added["content"].encode(), kind)
    table = TokenBytes.of(entries, max(num_ids or 0, max(entries) + 1))
    if not _is_byte_level(spec) and _puts_a_space_first(spec):
        table = TokenBytes(table.blob, table.offsets, table.kinds, strips_first_space=True)
    _check_round_trip(backend, table)
    return table


def _components(part: Any) -> Iterator[dict[str, Any]]:
    """Of a normalizer, pre-tokenizer or decoder: itself, or those that it is a sequence of."""
    if isinstance(part, dict):
        yield part
        for name in ("pretokenizers", "decoders", "normalizers"):
            for inner in part.get(name, ()):
                yield from _components(inner)


def _is_byte_level(spec: dict[str, Any]) -> bool:
    parts = (*_components(spec["decoder"]), *_components(spec["pre_tokenizer"]))
    return any(part["type"] == "ByteLevel" for part in parts)


def _puts_a_space_first(spec: dict[str, Any]) -> bool:
    for part in (*_components(spec["normalizer"]), *_components(spec["pre_tokenizer"])):
        if part["type"] == "Prepend":
            return True
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def _vocabulary(spec: dict[str, Any]) -> Iterator[tuple[int, tuple[bytes, TokenKind]]]:
    model = spec["model"]
    vocabulary = model.get("vocab", {})
    pieces: Iterable[tuple[str, int]]
    if isinstance(vocabulary, dict):
        pieces = vocabulary.items()
    else:
        pieces = ((piece, index) for index, (piece, _score) in enumerate(vocabulary))
    if _is_byte_level(spec):
        alphabet = byte_of_character()
        for piece, index in pieces:
            if all(character in alphabet for character in piece):
                yield index, (bytes(alphabet[c] for c in piece), TokenKind.TEXT)
            else:
                yield index, (b"", TokenKind.UNDECODABLE)
        return
    space = _space_of(spec)
    for piece, index in pieces:
        byte = BYTE_PIECE.fullmatch(piece)
        if byte:
            yield index, (bytes([int(byte[1], 16)]), TokenKind.TEXT)
        elif piece == model.get("unk_token") or index == model.get("unk_id"):
            yield index, (b"", TokenKind.UNDECODABLE)
        else:
            yield index, (piece.replace(space, " ").encode(), TokenKind.TEXT)


def _space_of(spec: dict[str, Any]) -> str:
    """The character that stands for a space in SentencePiece's pieces, mostly U+2581."""
    for part in _components(spec["decoder"]):
        if part["type"] == "Metaspace":
            return part["replacement"]
        if part["type"] == "Replace" and part.get("content") == " ":
            return part["pattern"]["String"]
    kinds = [part["type"] for part in _components(spec["decoder"])]
    raise ValueError(
        f"a tokenizer with decoder {kinds or None} is neither byte-level nor SentencePiece; use "
        "the target without block structure"
    )


def byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's printable alphabet: 188 bytes stand for themselves, the other 68 are
    counted up from U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    own += range(ord("®"), ord("ÿ") + 1)
    others = (byte for byte in range(256) if byte not in own)
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


def _check_round_trip(backend: Any, table: TokenBytes) -> None:
    tokens = backend.encode(PROBE, add_special_tokens=False).ids
    got, expected = table.decode(tokens), PROBE.encode()
    if got != expected:
        at = next(i for i in range(len(expected)) if got[: i + 1] != expected[: i + 1])
        raise ValueError(
            f"the tokenizer turns {expected[at : at + 12]!r} into {got[at : at + 12]!r}, so its "
            "tokens can't be read as bytes; use the target without block structure"
        )
