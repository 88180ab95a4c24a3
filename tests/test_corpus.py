"""The static corpus on disk: what is listed, what is refused, and that nobody can write to it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from dlite.corpora import read_texts
from dlite.retrieval import Rule
from dlite.retrieval.corpus import Document, build, load, map_arrays, read_manifest

DOCUMENTS = [
    Document("first.py", [1, 2, 3, 4, 5, 6], "MIT"),
    Document("second.py", [7, 1, 2, 3, 9, 9, 9]),
    Document("third.py", [0, 1, 2, 3, 9, 9, 8], "Apache-2.0"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(tmp_path / "corpus", DOCUMENTS, tokenizer="abc")
    return tmp_path / "corpus"


def test_a_loaded_corpus_votes_over_its_documents(folder: Path) -> None:
    cursor = load(folder, tokenizer="abc").cursor()
    cursor.extend([5, 1, 2, 3])
    found = cursor.find(Rule.VOTE, 8)
    assert (found.match_length, found.support, found.votes) == (3, 3, 1)
    assert found.tokens == [9, 9, 8]  # all three groups came once: the newest
    cursor.extend([9])
    assert cursor.find(Rule.FIRST, 8).tokens == [9, 9]


def test_no_continuation_runs_into_the_next_document(folder: Path) -> None:
    cursor = load(folder).cursor()
    cursor.extend([4, 5, 6])
    assert cursor.find(Rule.RECENT, 8).match_length == 0
    cursor.reset()
    cursor.extend([4, 5])
    assert cursor.find(Rule.RECENT, 8).tokens == [6]


def test_the_manifest_lists_every_source(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert [(s.source, s.licence, s.num_tokens) for s in manifest.sources] == [
        ("first.py", "MIT", 6),
        ("second.py", "", 7),
        ("third.py", "Apache-2.0", 7),
    ]
    assert manifest.num_tokens == 20
    assert len({s.sha256 for s in manifest.sources}) == 3


def test_the_arrays_cannot_be_written(folder: Path) -> None:
    file = folder / "corpus.safetensors"
    assert not stat.S_IMODE(file.stat().st_mode) & 0o222
    arrays = map_arrays(file)
    for array in arrays.named().values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    corpus = load(folder)
    assert not hasattr(corpus, "extend") and not hasattr(corpus, "end_segment")


def test_a_file_that_the_manifest_does_not_name_is_refused(folder: Path) -> None:
    file = folder / "corpus.safetensors"
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is not the file that its manifest names; build the"):
        load(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="built with tokenizer abc, the target's is xyz; build"):
        load(folder, tokenizer="xyz")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "sources": []}'])
def test_a_broken_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="is no corpus manifest"):
        load(folder)


def test_a_manifest_of_another_format_is_refused(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": "dlite-corpus/9"}))
    with pytest.raises(ValueError, match="has format 'dlite-corpus/9', not 'dlite-corpus/1'"):
        load(folder)


def test_a_corpus_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no documents for the corpus"):
        build(tmp_path, [], tokenizer="abc")
    with pytest.raises(ValueError, match=r"document 0 \('a'\) has 0 tokens; each needs"):
        build(tmp_path, [Document("a", [])], tokenizer="abc")
    with pytest.raises(ValueError, match=r"document 0 \(''\) has 1 tokens; each needs"):
        build(tmp_path, [Document("", [1])], tokenizer="abc")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("edge_target", 0, 1000), ("link", 1, -1), ("link", 2, 2), ("last", 0, 99), ("text", 0, -2)],
)
def test_arrays_that_lead_out_of_themselves_are_refused(
    folder: Path, name: str, place: int, value: int
) -> None:
    """A search would read memory that isn't the corpus's, or never end."""
    arrays = map_arrays(folder / "corpus.safetensors")
    wrong = np.array(getattr(arrays, name))
    wrong[place] = value
    with pytest.raises(ValueError, match="contradict each other; build the corpus again"):
        type(arrays)(**(arrays.named() | {name: wrong})).check()


def test_a_row_is_not_broken_at_the_line_separators_in_its_text(tmp_path: Path) -> None:
    """Answers are written as they are: U+2028 and U+0085 in a text end no JSONL row."""
    file = tmp_path / "answers.jsonl"
    said = "one\u2028two\u0085three"
    row = {"messages": [{"role": "assistant", "content": said}]}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert [t.text for t in read_texts([file], "MIT")] == [said]
