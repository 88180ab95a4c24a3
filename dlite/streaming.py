"""Text from tokens as they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode half a character to


class TextStream:
    """Decodes a growing token sequence piece by piece; the pieces join to the whole text.

    A piece never ends within a UTF-8 character: bytes wait for the token that completes them, or
    for `flush`. Each call decodes only the tokens since the last but one piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = self._shown = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text that can be shown now; empty while a character is incomplete."""
        self._tokens += tokens
        text = self._decode(None)
        if text.endswith(INCOMPLETE):
            return ""
        shown = self._decode(self._shown)
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(shown) :]

    def flush(self) -> str:
        """What is left at the end, broken bytes as replacement characters."""
        return self._decode(None)[len(self._decode(self._shown)) :]

    def _decode(self, end: int | None) -> str:
        return self._tokenizer.decode(
            self._tokens[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
