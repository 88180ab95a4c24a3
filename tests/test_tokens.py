"""The bytes behind token ids: real tokenizers, and what would make them wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from dlite.tokens import PROBE, TokenKind, token_bytes

if TYPE_CHECKING:
    from dlite.target import TargetModel

QWEN3 = Path(__file__).parents[2] / "shared/data/tokenizer_qwen3/tokenizer.json"
TEXT = ["def add(first, second):\n    return first + second\n", "the quick brown fox's 数据 🙂\n"]
UNICODE = 'café 数据 👩‍💻\r\n\t{"key": [1, 2]}  <b>ünïcode</b> \x00 𝄞\n'


def byte_level(*added: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece(*, metaspace: bool = False, fallback: bool = True) -> Tokenizer:
    """As Llama-2's: pieces with U+2581 for a space, and <0xNN> for what they don't cover."""
    bytes_used = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    letters = [*"abcdefghijklmnopqrstuvwxyz▁():,", "▁t", "▁th", "▁the"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *bytes_used, *letters])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=fallback, fuse_unk=True)
    )
    end = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace("▁"), *end[:2]])
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *end])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    return token_bytes(tokenizer).decode(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), sentencepiece(), sentencepiece(metaspace=True)],
    ids=["byte-level", "sentencepiece", "metaspace"],
)
@pytest.mark.parametrize("text", [PROBE, UNICODE, "the", "the  the ", "\n"])
def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert joined(tokenizer, text) == text.encode()


def test_a_token_may_be_a_part_of_a_character() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("🙂", add_special_tokens=False).ids
    table = token_bytes(tokenizer)
    assert [table[token] for token in tokens] == [b" ", b"\xf0", b"\x9f", b"\x99", b"\x82"]


def test_only_the_sequence_starts_without_its_space() -> None:
    table = token_bytes(sentencepiece())
    the = sentencepiece().get_vocab()["▁the"]
    assert table[the] == b" the"
    assert table.decode([the, the]) == b"the the"
    assert token_bytes(byte_level()).decode(byte_level().encode(" a").ids) == b" a"


def test_added_tokens_are_taken_as_they_are_written() -> None:
    """Not through the alphabet of bytes, in which "Ġ" would be a space and "é" no text at all."""
    contents = ["<think>", "two words", "Ġé"]
    added = [AddedToken(content, special=False) for content in contents]
    tokenizer = byte_level(*added, AddedToken("<|im_end|>", special=True))
    table = token_bytes(tokenizer, num_ids=420)
    ids = [tokenizer.get_vocab()[content] for content in contents]
    assert [table[token] for token in ids] == [content.encode() for content in contents]
    assert {table.kind(token) for token in ids} == {TokenKind.ADDED}
    end = tokenizer.get_vocab()["<|im_end|>"]
    assert (table[end], table.kind(end)) == (b"<|im_end|>", TokenKind.SPECIAL)


def test_padding_of_the_vocabulary_and_ids_beyond_it_are_holes() -> None:
    tokenizer = byte_level()
    table = token_bytes(tokenizer, num_ids=500)
    assert len(table) == 500
    for token in (tokenizer.get_vocab_size(), 499, 500, -1):
        assert (table[token], table.kind(token)) == (b"", TokenKind.HOLE)


def test_the_unknown_token_stands_for_no_text() -> None:
    table = token_bytes(sentencepiece())
    assert (table[0], table.kind(0)) == (b"", TokenKind.UNDECODABLE)


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    lower = byte_level()
    lower.normalizer = normalizers.Lowercase()
    wide = "use the target without block structure"
    with pytest.raises(ValueError, match=rf"turns .* into .* can't be read as bytes; {wide}"):
        token_bytes(sentencepiece(fallback=False))
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFD()
    with pytest.raises(ValueError, match=wide):
        token_bytes(tokenizer)


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\] is neither byte-level nor"):
        token_bytes(tokenizer)
    with pytest.raises(ValueError, match=r"object has no tokenizer.json to read; load a fast"):
        token_bytes(object())


@pytest.fixture(scope="module", params=["SmolLM2", "Qwen3"])
def real(request: pytest.FixtureRequest) -> Any:
    if request.param == "SmolLM2":
        target: TargetModel = request.getfixturevalue("smollm2")
        return target.tokenizer
    if not QWEN3.is_file():
        pytest.skip("needs ../shared/data/tokenizer_qwen3")
    return Tokenizer.from_file(str(QWEN3))


@pytest.mark.slow
def test_real_tokenizers_give_this_file_back(real: Any) -> None:
    table = token_bytes(real, num_ids=152_000)
    backend = getattr(real, "backend_tokenizer", real)
    for text in (Path(__file__).read_text(), UNICODE, PROBE):
        tokens = backend.encode(text, add_special_tokens=False).ids
        assert table.decode(tokens) == text.encode()
    end = backend.token_to_id("<|im_end|>")
    assert (table[end], table.kind(end)) == (b"<|im_end|>", TokenKind.SPECIAL)
    think = backend.token_to_id("<think>")
    assert think is None or table.kind(think) is TokenKind.ADDED
    assert table.kind(151_999) is TokenKind.HOLE
