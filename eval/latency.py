"""The time of a draft round by context length, and of the head alone.

    python -m eval.latency out=DIR contexts=64,1024,32768 shapes=dlite,dflash,dspark

Random weights: speed doesn't depend on them. Writes `summary.json` and `report.html`. A round
fetches the taps, brings the drafter's own state up to date and drafts K tokens. The shapes and
what they owe their state are in `eval.shapes`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from dlite.config import run
from dlite.files import writable
from dlite.model.heads import LowRankHead, MarkovHead
from eval.provenance import provenance
from eval.report import write_report
from eval.shapes import (
    PRESETS,
    SHAPES,
    Rounds,
    Tables,
    build_model,
    build_rounds,
    draft_config,
    draft_full_logits,
    draft_low_rank,
)

Key = TypeVar("Key")


@dataclass(kw_only=True)
class Config:
    """python -m eval.latency key=value ...: draft-round times of random models.

    `preset` and `head_preset` take a target's sizes for the rounds and for the head table;
    `num_layers` is the draft's depth. A verification is taken to add `num_new` tokens. A time is
    the best one of `repeats` turns of `rounds` rounds each."""

    out: str
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024, 4096, 16384, 32768])
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    preset: str = "smollm2"
    head_preset: str = "qwen3-4b"
    num_layers: int = 2
    num_draft: int = 7
    num_new: int = 4
    batch_size: int = 1
    repeats: int = 7
    rounds: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for known, names in ((SHAPES, self.shapes), (PRESETS, [self.preset, self.head_preset])):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is unknown; choose from {', '.join(known)}")
        if not self.contexts or min(self.contexts) < self.num_new:
            raise ValueError(f"contexts are {self.contexts}; give lengths from {self.num_new} on")
        if not 1 <= self.num_new <= self.num_draft + 1:
            raise ValueError(f"num_new is {self.num_new}; give 1 to {self.num_draft + 1}")
        if not hasattr(torch, self.dtype):
            raise ValueError(f"dtype is {self.dtype!r}; give float32, bfloat16 or float16")


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    context: int
    round_seconds: float
    ratio_to_shortest: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class HeadRow:
    """`weight_bytes` are read in one round, each reading of a matrix counted."""

    head: str
    round_seconds: float
    weight_bytes: int


def round_rows(config: Config) -> list[Row]:
    """Every shape at every context length."""
    torch.manual_seed(config.seed)
    dtype, sizes = getattr(torch, config.dtype), PRESETS[config.preset]
    tables = Tables(sizes, dtype, config.device)
    contexts = sorted(set(config.contexts))
    shapes: dict[str, tuple[Rounds, Tensor]] = {}
    for name in config.shapes:
        model = build_model(name, sizes, config.num_layers, config.num_draft, tables)
        num_rows, num_taps = config.num_draft + 1, len(model.config.tap_ids)
        taps_BTLD = torch.randn(config.batch_size, num_rows, num_taps, sizes.hidden_size)
        rounds = build_rounds(name, model, tables, config.batch_size, contexts)
        shapes[name] = rounds, taps_BTLD.to(config.device, dtype)

    def job(name: str, context: int) -> Callable[[], object]:
        rounds, taps_BTLD = shapes[name]
        return lambda: rounds.round(context, taps_BTLD, config.num_new)

    jobs = {(name, context): job(name, context) for name in shapes for context in contexts}
    seconds = best_seconds(jobs, config)
    return [
        Row(
            shape=name,
            context=context,
            round_seconds=seconds[name, context],
            ratio_to_shortest=seconds[name, context] / seconds[name, contexts[0]],
            state_bytes=shapes[name][0].state_bytes(context),
        )
        for name, context in jobs
    ]


def head_rows(config: Config) -> list[HeadRow]:
    """DLite's head beside the full-vocabulary heads, fed the same random states."""
    torch.manual_seed(config.seed)
    dtype, sizes = getattr(torch, config.dtype), PRESETS[config.head_preset]
    num_draft = config.num_draft
    head_VD = Tables(sizes, dtype, config.device).head_weight_VD
    low_rank, markov = (
        head_class(draft_config(name, sizes, config.num_layers, num_draft)).to(head_VD)
        for head_class, name in ((LowRankHead, "dlite"), (MarkovHead, "dspark"))
    )
    assert isinstance(low_rank, LowRankHead) and isinstance(markov, MarkovHead)
    h_BKD = head_VD.new_empty(config.batch_size, num_draft, sizes.hidden_size).normal_()
    anchor_B = torch.zeros(config.batch_size, dtype=torch.long, device=head_VD.device)
    jobs: dict[str, Callable[[], object]] = {
        "dlite": lambda: draft_low_rank(h_BKD, anchor_B, low_rank),
        "dflash": lambda: draft_full_logits(h_BKD, anchor_B, head_VD, None),
        "dspark": lambda: draft_full_logits(h_BKD, anchor_B, head_VD, markov),
    }
    seconds = best_seconds(jobs, config)
    matrices = (low_rank.output_proj, low_rank.state_proj, low_rank.state_hidden_mlp)
    read = {
        "dlite": num_draft * sum(_bytes(matrix.weight) for matrix in matrices),
        "dflash": _bytes(head_VD),
        "dspark": _bytes(head_VD) + num_draft * _bytes(markov.markov_w2.weight),
    }
    return [HeadRow(name, seconds[name], read[name]) for name in jobs]


def best_seconds(jobs: Mapping[Key, Callable[[], object]], config: Config) -> dict[Key, float]:
    """Seconds of one call of each job. The jobs take turns, so that a slow spell hits all."""
    best = dict.fromkeys(jobs, float("inf"))
    for job in jobs.values():
        job()
    for _ in tqdm(range(config.repeats), "repeats", disable=None):
        for name, job in jobs.items():
            for _ in range(config.rounds):
                _wait(config.device)
                start = time.perf_counter()
                job()
                _wait(config.device)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def summarise(config: Config) -> dict[str, Any]:
    sizes = PRESETS[config.head_preset]
    ranks = {n: draft_config(n, sizes, 1, config.num_draft).rank for n in ("dlite", "dspark")}
    return {
        "program": "eval.latency",
        "config": asdict(config),
        **provenance(config.device),
        "sizes": asdict(PRESETS[config.preset]),
        "rows": [asdict(row) for row in round_rows(config)],
        "head_sizes": (
            f"V={sizes.vocab_size:,}, D={sizes.hidden_size:,}, K={config.num_draft}, "
            f"R={ranks['dlite']} (dlite), R={ranks['dspark']} (dspark), {config.dtype}"
        ),
        "head_rows": [asdict(row) for row in head_rows(config)],
    }


def print_tables(summary: dict[str, Any], out: Path) -> None:
    print(f"{'shape':8} {'context':>8} {'round ms':>9} {'ratio':>7} {'state MiB':>10}")
    for row in summary["rows"]:
        print(
            f"{row['shape']:8} {row['context']:8} {1e3 * row['round_seconds']:9.2f} "
            f"{row['ratio_to_shortest']:6.2f}x {row['state_bytes'] / 2**20:10.1f}"
        )
    print(f"\nhead alone: {summary['head_sizes']}")
    for row in summary["head_rows"]:
        mebibytes = row["weight_bytes"] / 2**20
        print(f"{row['head']:8} {1e3 * row['round_seconds']:9.1f} ms {mebibytes:9,.0f} MiB read")
    print(f"written: {out}/summary.json, report.html")


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    summary = summarise(config)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report([summary], out / "report.html")
    print_tables(summary, out)


if __name__ == "__main__":
    run(Config, main)
