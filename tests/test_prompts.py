"""The quickstart's prompts: the held-out ones must measure generalisation, not recall.

Two prompts share a template when, with quoted text, numbers, names and content words blanked,
the same frame is left ("why do _ in _"), or when they open with the same five words, or when
their word 5-grams overlap by more than a fifth (Jaccard).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations, product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "train/prompts/quickstart.jsonl"
HELDOUT = ROOT / "eval/prompts/heldout.jsonl"
SPEC_BENCH = ROOT.parent / "shared/data/spec_bench/question.jsonl"

QUOTED = re.compile(r'"[^"]*"')
NAME = re.compile(r"(?<=[a-z,;] )[A-Z]\w*(?: [A-Z]\w*)*")
FUNCTION_WORDS = """
a an the this that these those each every any some all both no not and or but so if when
while because then than as of in on at by for from to into with without about over under
between before after is are was were be been being do does did has have had can could would
should will may might must i me my you your he him his she her it its we us our they them
their who whom whose which what where why how please there here
"""
FRAME_WORDS = frozenset(FUNCTION_WORDS.split())

Prompt = tuple[str, str]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(path: Path) -> list[Prompt]:
    """Every message, not only the last: an earlier turn can leak just as well."""
    return [(row["id"], m["content"]) for row in rows(path) for m in row["messages"]]


def requests(path: Path) -> list[Prompt]:
    return [(row["id"], row["messages"][-1]["content"]) for row in rows(path)]


def words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", "", text.lower()).split()


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    w = words(text)
    return {tuple(w[i : i + n]) for i in range(len(w) - n + 1)}


def frame(text: str) -> tuple[str, ...]:
    blanked = NAME.sub("_", QUOTED.sub("_", text))
    out: list[str] = []
    for word in re.findall(r"\w+", blanked.lower()):
        kept = word if word in FRAME_WORDS else "_"
        if kept != "_" or out[-1:] != ["_"]:
            out.append(kept)
    return tuple(out)


def shared_ngrams(left: Iterable[Prompt], right: Iterable[Prompt], n: int) -> Iterator[str]:
    owner = {gram: name for name, text in right for gram in ngrams(text, n)}
    for name, text in left:
        for gram in ngrams(text, n) & owner.keys():
            yield f"{name} and {owner[gram]} share {' '.join(gram)!r}"


def shared_templates(pairs: Iterable[tuple[Prompt, Prompt]]) -> Iterator[str]:
    made: dict[str, tuple] = {}

    def parts(text: str) -> tuple:
        if text not in made:
            made[text] = (words(text)[:5], frame(text), ngrams(text, 5))
        return made[text]

    for (left, left_text), (right, right_text) in pairs:
        opening, left_frame, grams = parts(left_text)
        other_opening, right_frame, other_grams = parts(right_text)
        pair = f"{left} and {right}"
        if opening == other_opening:
            yield f"{pair} both open with {' '.join(opening)!r}"
        if left_frame == right_frame:
            yield f"{pair} share the frame {' '.join(left_frame)!r}"
        union = len(grams | other_grams)
        if union and len(grams & other_grams) > 0.2 * union:
            yield f"{pair} share more than a fifth of their 5-grams"


@pytest.mark.parametrize(("path", "count"), [(TRAIN, 558), (HELDOUT, 32)])
def test_prompt_file_lost_a_row_repeats_an_id_or_has_nothing_to_answer(
    path: Path, count: int
) -> None:
    found = rows(path)
    assert len(found) == count
    repeated = [name for name, n in Counter(row["id"] for row in found).items() if n > 1]
    assert not repeated
    for row in found:
        roles = [m["role"] for m in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
        assert turns == expected and len(turns) % 2 == 1, f"{row['id']}: roles {roles}"
        assert all(m["content"].strip() for m in row["messages"]), f"{row['id']} has an empty turn"


def test_prompt_is_too_long_for_a_quick_answer_or_too_short_to_ask_anything() -> None:
    for name, size in (
        (row["id"], sum(len(words(m["content"])) for m in row["messages"]))
        for path in (TRAIN, HELDOUT)
        for row in rows(path)
    ):
        assert 5 <= size <= 120, f"{name} has {size} words"


def test_heldout_prompt_leaks_an_8_gram_from_training() -> None:
    leaks = list(shared_ngrams(texts(HELDOUT), texts(TRAIN), 8))
    assert not leaks, "\n".join(leaks)


def test_heldout_prompt_is_a_training_template_refilled() -> None:
    clashes = list(shared_templates(product(requests(HELDOUT), requests(TRAIN))))
    assert not clashes, "\n".join(clashes)


@pytest.mark.parametrize("path", [TRAIN, HELDOUT])
def test_prompt_file_was_padded_by_refilling_its_own_templates(path: Path) -> None:
    clashes = list(shared_templates(combinations(requests(path), 2)))
    assert not clashes, "\n".join(clashes)


@pytest.mark.parametrize("path", [TRAIN, HELDOUT])
def test_prompt_was_copied_from_spec_bench(path: Path) -> None:
    if not SPEC_BENCH.exists():
        pytest.skip("no ../shared/data/spec_bench/question.jsonl to compare with")
    bench = [
        (f"question {row['question_id']}", t) for row in rows(SPEC_BENCH) for t in row["turns"]
    ]
    leaks = list(shared_ngrams(texts(path), bench, 8))
    assert not leaks, "\n".join(leaks)


def test_template_check_misses_a_refilled_slot() -> None:
    original = ("a", "Why do leaves turn red in October?")
    assert list(shared_templates([(original, ("b", "Why do foxes bury eggs in Norway?"))]))
    assert list(shared_templates([(original, ("b", "Why do leaves turn red, if they are ill?"))]))
    assert not list(shared_templates([(original, ("b", "What makes leaves red each autumn?"))]))
