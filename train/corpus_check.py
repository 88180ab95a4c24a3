"""`python -m train.data check`: what a corpus holds, and why rows of it would not be trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite.target import TargetModel
from train.data import anchors, load_samples


@dataclass
class Check:
    """Reads every row as training would; rejected rows are counted by reason.

    Raises no row's fault as an error: only a corpus without one usable row is one.
    """

    target: str
    data: list[str]
    max_length: int = 4096
    last_turn_only: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    anchors_per_sample: int = 512
    out: str | None = None  # also writes the report as JSON


def check(config: Check) -> None:
    target = TargetModel.load(config.target)
    corpus = load_samples(
        config.data,
        target,
        max_length=config.max_length,
        last_turn_only=config.last_turn_only,
        template_kwargs=config.template_kwargs,
        limit=config.limit,
    )
    lengths = sorted(len(s.input_ids) for s in corpus.samples)
    report = {
        "samples": len(lengths),
        "rejected": dict(corpus.rejected.most_common()),
        "tokens": sum(lengths),
        "supervised_tokens": sum(sum(s.loss_mask) for s in corpus.samples),
        "anchors_an_epoch": sum(
            len(anchors(s, 0, 0, config.anchors_per_sample)) for s in corpus.samples
        ),
        "length_quantiles": {
            f"{q}%": lengths[min(len(lengths) - 1, len(lengths) * q // 100)]
            for q in (0, 10, 50, 90, 100)
        },
    }
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, number in value.items():
                print(f"  {number:>12,}  {key}")
        else:
            print(f"{name}: {value:,}")
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        Path(config.out).write_text(json.dumps(report, indent=2) + "\n")
