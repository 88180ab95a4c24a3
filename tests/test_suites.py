"""Prompts from files and from the hub's schemas."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from eval.suites import (
    HUB_SUITES,
    Item,
    hub_items,
    load_suite,
    load_suites,
    prompts_sha256,
)

ROOT = Path(__file__).parents[1]
SPEC_BENCH = ROOT.parent / "shared/data/spec_bench/question.jsonl"


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_turn_is_lost(tmp_path: Path) -> None:
    name = write(tmp_path / "chat.jsonl", {"turns": ["Hello.", "And now?"]}, {"prompt": "Hi."})
    first, second = load_suite(name)
    assert first == Item("chat-1", "chat", [user("Hello."), user("And now?")])
    assert second == Item("chat-2", "chat", [user("Hi.")])


def test_a_recorded_answer_is_shown_to_the_target(tmp_path: Path) -> None:
    system, asked = {"role": "system", "content": "Be brief."}, user("Why?")
    earlier = [user("What?"), {"role": "assistant", "content": "That."}]
    answer = {"role": "assistant", "content": "Because."}
    row = {"id": "x", "messages": [system, *earlier, asked, answer]}
    (item,) = load_suite(write(tmp_path / "chat.jsonl", row))
    assert item == Item("x", "chat", [asked], [system, *earlier])


def test_spec_bench_is_not_reported_by_its_six_tasks(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 121, "category": "math", "turns": ["c", "d"]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["e"], "reference": ["f"]},
    ]
    items = load_suite(write(tmp_path / "question.jsonl", *rows))
    assert [item.category for item in items] == [
        "multi-turn conversation",
        "multi-turn conversation",
        "math_reasoning",
    ]
    assert [item.id for item in items] == ["81", "121", "401"]


def test_the_published_spec_bench_file_is_refused() -> None:
    if not SPEC_BENCH.exists():
        pytest.skip("no ../shared/data/spec_bench/question.jsonl to read")
    items = load_suite(str(SPEC_BENCH))
    tasks = Counter(item.category for item in items)
    assert len(items) == 480 and len(tasks) == 6 and set(tasks.values()) == {80}
    assert sum(len(item.turns) for item in items) == 480 + 80


def test_limit_takes_other_than_the_first_rows(tmp_path: Path) -> None:
    name = write(tmp_path / "many.jsonl", *({"prompt": str(n)} for n in range(9)))
    assert [item.turns[0]["content"] for item in load_suite(name, limit=2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: no JSON"),
        ("[1]", "line 2: list in place of an object"),
        ('{"text": "a"}', r"line 2: no prompt found; give 'turns' .*not \['text'\]"),
        ('{"turns": []}', "line 2: no prompt found"),
        ('{"turns": [1]}', "line 2: no prompt found"),
        ('{"messages": [{"role": "user"}]}', "line 2: 'messages' must be a list of objects"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "line 2: no message to answer"),
    ],
)
def test_a_broken_row_is_skipped_or_unnamed(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        load_suite(str(path))
    assert "\n" not in str(error.value)


def test_an_unknown_suite_is_taken_for_a_hub_id() -> None:
    with pytest.raises(ValueError, match=r"suite 'gsm9k' is neither.* gsm8k, math500, humaneval"):
        load_suite("gsm9k")


def test_an_empty_suite_gives_an_empty_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no prompts"):
        load_suite(write(tmp_path / "empty.jsonl"))


def test_two_suites_share_an_id_and_their_requests_are_mixed_up(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{n}.jsonl", {"id": "1", "prompt": n}) for n in "ab"]
    with pytest.raises(ValueError, match="id '1' occurs more than once"):
        load_suites(names)


def test_other_questions_have_the_same_hash() -> None:
    first, second = Item("a", "c", [user("x")]), Item("b", "c", [user("y")])
    changed = replace(first, turns=[user("z")])
    hashes = [prompts_sha256(items) for items in ([first, second], [second, first], [changed])]
    assert len(set(hashes)) == 3
    assert prompts_sha256([first, second]) == hashes[0]


# One row of each public data set's schema, with the text that must reach the target.
HUB_ROWS = {
    "gsm8k": ({"question": "2 + 2?", "answer": "#### 4"}, "2 + 2?"),
    "math500": ({"problem": "x = 1?", "solution": "", "answer": "", "level": 1}, "x = 1?"),
    "humaneval": ({"task_id": "0", "prompt": "def f():", "canonical_solution": ""}, "def f():"),
    "mbpp": ({"task_id": 1, "text": "Add.", "code": "", "test_list": ["assert f"]}, "assert f"),
    "mt_bench": ({"prompt_id": 1, "category": "math", "prompt": ["One?", "Two?"]}, "One?"),
    "alpaca": ({"instruction": "Sum up.", "input": "Text.", "output": ""}, "Sum up.\n\nText."),
    "ifeval": ({"key": 1, "prompt": "No commas.", "kwargs": []}, "No commas."),
    "swe_bench": ({"instance_id": "i", "problem_statement": "It fails."}, "It fails."),
    "longbench_v2": (
        {"context": "Long.", "question": "Q?", **{f"choice_{c}": c * 2 for c in "ABCD"}},
        "Long.\n\nQ?\n(A) AA\n(B) BB",
    ),
}


@pytest.mark.parametrize("name", HUB_SUITES)
def test_a_hub_suite_reads_columns_that_the_data_set_lacks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    row, expected = HUB_ROWS[name]
    suite = HUB_SUITES[name]
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / f"{suite.split}.jsonl", row)
    local = replace(suite, hub_id=str(folder), config=None)
    (item,) = hub_items(local, name)
    assert item.id == f"{name}-0" and item.category == name
    assert expected in item.turns[0]["content"]


def test_second_turn_of_a_hub_suite_is_lost() -> None:
    turns = HUB_SUITES["mt_bench"].turns({"prompt": ["One?", "Two?"]})
    assert turns == ["One?", "Two?"]
