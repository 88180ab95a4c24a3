"""Prompts to evaluate on: JSONL files, and public benchmarks by name.

Rows of a file are `{"turns": [...]}` (Spec-Bench's question.jsonl included), `{"messages": [...]}`
or `{"prompt": ...}`; `id` or `question_id` and `category` are optional.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Spec-Bench keeps MT-Bench's eight categories in its rows and reports them as one of six tasks.
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation to be played: `turns` are user messages that the target answers one after
    the other, `context` is what stands before them."""

    id: str
    category: str
    turns: list[Row]
    context: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HubSuite:
    """A data set on the hub; `turns` makes a row's user messages."""

    hub_id: str
    split: str
    turns: Callable[[Row], list[str]]
    config: str | None = None


def _reasoned(column: str) -> Callable[[Row], list[str]]:
    # The instruction that the Qwen3 model cards recommend for mathematics.
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [row[column] + ask]


def _complete_function(row: Row) -> list[str]:
    return [f"Complete this Python function:\n```python\n{row['prompt']}\n```"]


def _described_function(row: Row) -> list[str]:
    return [f"{row['text']}\nThe code must pass these tests:\n" + "\n".join(row["test_list"])]


def _instruction(row: Row) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)]


def _multiple_choice(row: Row) -> list[str]:
    choices = "\n".join(f"({letter}) {row['choice_' + letter]}" for letter in "ABCD")
    return [f"{row['context']}\n\n{row['question']}\n{choices}"]


HUB_SUITES = {
    "gsm8k": HubSuite("openai/gsm8k", "test", _reasoned("question"), "main"),
    "math500": HubSuite("HuggingFaceH4/MATH-500", "test", _reasoned("problem")),
    "humaneval": HubSuite("openai/openai_humaneval", "test", _complete_function),
    "mbpp": HubSuite("google-research-datasets/mbpp", "test", _described_function, "full"),
    "mt_bench": HubSuite("HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"]),
    "alpaca": HubSuite("tatsu-lab/alpaca", "train", _instruction),
    "ifeval": HubSuite("google/IFEval", "train", lambda row: [row["prompt"]]),
    "swe_bench": HubSuite(
        "princeton-nlp/SWE-bench_Lite", "test", lambda row: [row["problem_statement"]]
    ),
    "longbench_v2": HubSuite("zai-org/LongBench-v2", "train", _multiple_choice),
}


def load_suites(names: Sequence[str], limit: int = 0) -> list[Item]:
    """The first `limit` items (0: all) of each suite. Raises ValueError for a repeated id."""
    items = [item for name in names for item in load_suite(name, limit)]
    repeated = [item_id for item_id, n in Counter(item.id for item in items).items() if n > 1]
    if repeated:
        raise ValueError(
            f"id {repeated[0]!r} occurs more than once in {', '.join(names)}; make ids unique"
        )
    return items


def load_suite(name: str, limit: int = 0) -> list[Item]:
    """The first `limit` items (0: all) of a JSONL file or of a suite that HUB_SUITES names, by
    short name or by hub id.

    Raises ValueError for an unknown name, a broken row, and for no items at all.
    """
    if Path(name).is_file():
        items = file_items(Path(name))
    else:
        by_hub_id = {suite.hub_id: key for key, suite in HUB_SUITES.items()}
        key = by_hub_id.get(name, name)
        if key not in HUB_SUITES:
            raise ValueError(
                f"suite {name!r} is neither a file nor a known benchmark; give a .jsonl file or "
                f"one of {', '.join(HUB_SUITES)}"
            )
        items = hub_items(HUB_SUITES[key], key)
    found = list(islice(items, limit or None))
    if not found:
        raise ValueError(f"suite {name!r} has no prompts; give one with at least one row")
    return found


def file_items(path: Path) -> Iterator[Item]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _item(line, f"{path}, line {number}", path.stem, number)


def hub_items(suite: HubSuite, category: str) -> Iterator[Item]:
    """Rows of the hub's data set, read through `datasets`; ids are row numbers."""
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(suite.hub_id, suite.config, split=suite.split)):
        assert isinstance(row, dict)
        yield Item(f"{category}-{number}", category, _users(suite.turns(row)))


def prompts_sha256(items: Iterable[Item]) -> str:
    """A hash of all turns and contexts in order: equal hashes, equal questions."""
    text = json.dumps([asdict(item) for item in items], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _item(line: str, where: str, stem: str, number: int) -> Item:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON ({error}); mend or remove the line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__} in place of an object with 'turns'")
    category = str(row.get("category", stem))
    if "question_id" in row and category in MT_BENCH_CATEGORIES:
        category = "multi-turn conversation"
    turns, context = _conversation(row, where)
    name = row.get("id", row.get("question_id", f"{stem}-{number}"))
    return Item(str(name), category, turns, context)


def _conversation(row: Row, where: str) -> tuple[list[Row], list[Row]]:
    """User messages to answer, and what stands before them."""
    if "messages" in row:
        messages = _messages(row["messages"], where)
        while messages and messages[-1]["role"] == "assistant":  # a recorded answer
            messages.pop()
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise ValueError(f"{where}: no message to answer; end 'messages' with one of a user")
        return messages[-1:], messages[:-1]
    texts = row.get("turns", row.get("prompt"))
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError(
            f"{where}: no prompt found; give 'turns' (a list of texts), 'messages' or 'prompt', "
            f"not {sorted(row)}"
        )
    return _users(texts), []


def _messages(messages: Any, where: str) -> list[Row]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    ):
        raise ValueError(f"{where}: 'messages' must be a list of objects with role and content")
    return list(messages)


def _users(texts: list[str]) -> list[Row]:
    return [{"role": "user", "content": text} for text in texts]
