"""Rows for tests of training data, and what is supervised in a sample, to be read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from dlite.target import TargetModel
from train.data import Corpus, Sample, load_samples


def with_template(target: TargetModel, template: str) -> TargetModel:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return TargetModel(target.model, tokenizer, target.name)


def load(folder: Path, target: TargetModel, *rows: Any, **options: Any) -> Corpus:
    """Loads rows from a file; a row that is text is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return load_samples(file, target, **options)


def marked(sample: Sample, target: TargetModel) -> str:
    """The sample's text with supervised stretches in [[ ]]."""
    text, start = "", 0
    for end in range(1, len(sample.input_ids) + 1):
        if end == len(sample.input_ids) or sample.loss_mask[end] != sample.loss_mask[start]:
            piece = target.tokenizer.decode(sample.input_ids[start:end])
            text += f"[[{piece}]]" if sample.loss_mask[start] else piece
            start = end
    return text


def talk(*turns: str, **last: Any) -> list[dict[str, Any]]:
    """User and assistant in turn; `last` are further keys of the last message."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return [*messages[:-1], {**messages[-1], **last}]
