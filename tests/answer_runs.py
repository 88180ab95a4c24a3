"""Runs of train.regenerate on the tiny target, for its tests and its client's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlite.config import parse
from train.regenerate import Config, regenerate

ASKED = ("Where is the fox?", "Add two numbers.", "Hi", "Jump over the lazy dog", "42?", "Who?")


def write_prompts(folder: Path) -> Path:
    """ASKED as prompts p0, p1, ..."""
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"id": f"p{i}", "turns": [q]}) + "\n" for i, q in enumerate(ASKED))
    )
    return file


def run(target: Path | None, prompts: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    """Runs the program in this process; the rows of `out` afterwards."""
    common = [f"prompts={prompts}", f"out={out}", "max_new_tokens=12"]
    common += [f"target={target}"] if target else []
    regenerate(parse(Config, [*common, *options]))
    return read(out)


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a torn last one. Text may hold other line ends than \n."""
    whole, _, _ = out.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.split("\n")] if whole else []


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows}
