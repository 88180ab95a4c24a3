"""The answers that the repository ships are the target's own, to its own prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite.decode import decode, top2_margins
from dlite.target import TargetModel
from dlite.types import Request

TRAIN = Path(__file__).parents[1] / "train"
ANSWERS = TRAIN / "quickstart" / "answers.jsonl"
NEAR_TIE = 1e-3  # a top-2 margin under which batch arithmetic may decide


def shipped() -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, ANSWERS.read_text().splitlines())}


def test_shipped_answers_are_small_and_answer_the_shipped_prompts() -> None:
    lines = (TRAIN / "prompts" / "quickstart.jsonl").read_text().splitlines()
    prompts = {row["id"]: row["messages"] for row in map(json.loads, lines)}
    rows = shipped()
    assert ANSWERS.stat().st_size < 1_000_000
    assert rows.keys() <= prompts.keys()
    assert all(row["messages"] == prompts[name] for name, row in rows.items())


def test_shipped_answers_were_made_by_this_target(smollm2: TargetModel) -> None:
    settings = json.loads(ANSWERS.with_name("answers.jsonl.settings.json").read_text())
    made_by = smollm2.fingerprint()
    assert settings["temperature"] == 0
    for part in ("weights", "tokenizer"):
        assert settings[part] == made_by[part]


@pytest.mark.slow
def test_shipped_answers_are_regenerated_up_to_near_ties(smollm2: TargetModel) -> None:
    settings = json.loads(ANSWERS.with_name("answers.jsonl.settings.json").read_text())
    rows = shipped()
    limit = settings["max_new_tokens"]
    short = sorted(rows, key=lambda name: (len(rows[name]["answer_ids"]), name))
    picked = [short[len(short) * k // 4] for k in range(4)]
    requests = [Request(name, smollm2.render(rows[name]["messages"]), limit) for name in picked]
    for request, completion in zip(
        requests, decode(smollm2, requests, None).completions, strict=True
    ):
        row = rows[request.id]
        pairs = zip(row["answer_ids"], completion.tokens, strict=False)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            assert row["answer_ids"] == completion.tokens
            assert row["finish_reason"] == completion.finish_reason
        else:
            margins = top2_margins(smollm2, request.prompt, completion.tokens)
            assert margins[parted] < NEAR_TIE, (request.id, parted, margins[parted])
