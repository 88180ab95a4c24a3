"""Speed under load of every drafter in a vLLM server, against plain decoding in the same run.

    python -m eval.throughput target=DIR draft=DIR suite=FILE drafter=plain,ngram,sam,dlite,hybrid \
        concurrency=1,8,32 out=DIR

writes `summary.json`, a row per suite, drafter and concurrency, and `report.html`. Drafters take
turns, so that a slow minute of the machine is everybody's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlite import checkpoint
from dlite.client import extra_body
from dlite.config import run
from dlite.files import writable
from dlite.serve import servable
from eval.provenance import provenance
from eval.report import write_report
from eval.serving import PLAIN, Answer, Ask, Endpoint, endpoints
from eval.suites import load_suite
from eval.traces import Session, read_sessions

DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted"))


@dataclass(kw_only=True)
class Config:
    """python -m eval.throughput key=value ...: serving speed of drafters.

    `suite` takes prompt files and `sessions:FILE` for recorded agent sessions (their eval split;
    true prompts, one call after the other in a session). `limit`: items of each suite, `calls` of
    each session (0: all). `flags` go to every server. plain_async, ngram and suffix are vLLM's own;
    plain is always measured."""

    target: str
    suite: list[str]
    out: str
    drafter: list[str]
    draft: str | None = None
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    limit: int = 0
    calls: int = 0
    max_new_tokens: int = 128
    num_draft: int = 0
    repeats: int = 2
    flags: str = ""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if min(self.concurrency, default=0) < 1 or self.repeats < 1:
            raise ValueError(f"concurrency {self.concurrency}, repeats {self.repeats}; give >= 1")
        self.drafter = [name for name in dict.fromkeys(self.drafter) if name != PLAIN]


@dataclass(slots=True)
class Row:
    """Times are the medians and tails of all requests; the speed is all tokens by all seconds."""

    suite: str
    drafter: str
    concurrency: int
    tokens_per_second: float
    speedup_vs_plain: float
    tau: float
    rejection_rate: float | None
    ttft_p50_seconds: float
    tpot_p50_seconds: float
    e2e_p50_seconds: float
    e2e_p90_seconds: float
    e2e_p99_seconds: float
    draft_share: float  # of the wall-clock, where the drafter is ours
    identical_share: float
    num_requests: int


@dataclass(slots=True)
class Run:
    """All turns of one drafter over a suite at one concurrency."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)


def workload(name: str, config: Config) -> list[list[Ask]]:
    """Chains of calls: those of one chain are made one after the other."""
    if name.startswith("sessions:"):
        sessions = read_sessions([name.removeprefix("sessions:")], "eval", config.limit)
        return [list(_calls(session, config.calls)) for session in sessions]
    items = load_suite(name, config.limit)
    return [[Ask(item.id, [*item.context, *item.turns[:1]])] for item in items]


def _calls(session: Session, limit: int) -> Iterator[Ask]:
    """The prompt of each recorded call: what its scope held before it."""
    made = 0
    for place, message in enumerate(session.messages):
        if not message.generated or (limit and made == limit):
            continue
        made += 1
        before = [
            m
            for m in session.messages[:place]
            if m.scope == message.scope and (not m.transient or m.turn == message.turn)
        ]
        files = [file for m in before if m.turn == message.turn for file in m.files]
        roles = {"tool": "user"}  # a target's template may know no tools
        yield Ask(
            f"{session.id} {place}",
            [{"role": roles.get(m.role, m.role), "content": m.text} for m in before],
            extra_body(session=session.id, agent=message.agent, files=files),
        )


def measure(
    where: Mapping[str, Endpoint], chains: Sequence[Sequence[Ask]], concurrency: int, config: Config
) -> dict[str, Run]:
    """Each drafter's runs; in every repeat another one begins."""
    names, runs = list(where), {name: Run() for name in where}
    for repeat in range(config.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            endpoint, result = where[name], runs[name]
            before, begin = endpoint.counters(), time.perf_counter()
            with ThreadPoolExecutor(concurrency) as pool:
                played = pool.map(partial(_play, endpoint, repeat, config), chains)
                result.answers += [answer for answers in played for answer in answers]
            result.seconds += time.perf_counter() - begin
            for key, value in endpoint.counters().items():
                grown = value - before.get(key, 0.0)
                result.counted[key] = result.counted.get(key, 0.0) + grown
    return runs


def _play(endpoint: Endpoint, repeat: int, config: Config, chain: Sequence[Ask]) -> list[Answer]:
    """Sessions of another repeat are others: what a drafter learnt in the first is not its own, and
    no drafter's prompts were read by the one before."""
    answers, salt = [], f"{endpoint.drafter} {time.monotonic_ns()}"
    for number, ask in enumerate(chain):
        extra = dict(ask.extra.get("vllm_xargs", {}))
        if "dlite_session_id" in extra:
            extra["dlite_session_id"] += f" {repeat} {endpoint.drafter}"
            extra["dlite_session_end"] = int(number == len(chain) - 1)
        one = Ask(ask.id, ask.messages, {"vllm_xargs": extra}, salt)
        answers.append(endpoint.ask(one, config.max_new_tokens))
    return answers


def rows(suite: str, concurrency: int, runs: Mapping[str, Run]) -> list[Row]:
    plain = runs[PLAIN]
    texts = {answer.id: answer.text for answer in plain.answers}
    return [
        _row(suite, name, concurrency, result, _speed(plain), texts)
        for name, result in runs.items()
    ]


def _row(
    suite: str, name: str, concurrency: int, run: Run, plain: float, texts: Mapping[str, str]
) -> Row:
    tokens = sum(answer.num_tokens for answer in run.answers)
    later = tokens - len(run.answers)  # a request's first token is the prefill's
    drafted, accepted = (run.counted.get(key, 0.0) for key in (DRAFTED, ACCEPTED))
    totals = [answer.total_seconds for answer in run.answers]
    gaps = [
        (answer.total_seconds - answer.first_seconds) / (answer.num_tokens - 1)
        for answer in run.answers
        if answer.num_tokens > 1
    ]
    return Row(
        suite=suite,
        drafter=name,
        concurrency=concurrency,
        tokens_per_second=_speed(run),
        speedup_vs_plain=_speed(run) / plain,
        tau=later / max(1.0, later - accepted),
        rejection_rate=1 - accepted / drafted if drafted else None,
        ttft_p50_seconds=float(np.median([answer.first_seconds for answer in run.answers])),
        tpot_p50_seconds=float(np.median(gaps)) if gaps else 0.0,
        e2e_p50_seconds=float(np.percentile(totals, 50)),
        e2e_p90_seconds=float(np.percentile(totals, 90)),
        e2e_p99_seconds=float(np.percentile(totals, 99)),
        draft_share=run.counted.get("dlite:draft_seconds_total", 0.0) / run.seconds,
        identical_share=sum(a.text == texts[a.id] for a in run.answers) / len(run.answers),
        num_requests=len(run.answers),
    )


def _speed(run: Run) -> float:
    return sum(answer.num_tokens for answer in run.answers) / run.seconds


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    trained = checkpoint.read(config.draft).config.num_draft_tokens if config.draft else 7
    found: list[Row] = []
    with endpoints(
        servable(config.target),
        config.drafter,
        config.draft,
        num_draft=config.num_draft or trained,
        flags=config.flags.split(),
        logs=out,
    ) as where:
        for suite in config.suite:
            chains = workload(suite, config)
            warm = [chain[:1] for chain in chains[:2]]
            measure(where, warm, 1, config)
            for concurrency in config.concurrency:
                found += rows(suite, concurrency, measure(where, chains, concurrency, config))
                summary = _summary(config, found)
                (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_report([_summary(config, found)], out / "report.html")
    for row in found:
        print(
            f"{row.suite}  {row.drafter:<12} x{row.concurrency:<3} {row.tokens_per_second:8.1f} "
            f"tokens/s  {row.speedup_vs_plain:.2f}x  tau {row.tau:.2f}  "
            f"identical {row.identical_share:.0%}"
        )


def _summary(config: Config, found: Sequence[Row]) -> dict[str, Any]:
    return {
        "program": "eval.throughput",
        "config": asdict(config),
        **provenance(config.device),
        "rows": [asdict(row) for row in found],
    }


if __name__ == "__main__":
    run(Config, main)
