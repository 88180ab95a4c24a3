"""Plain decoding and every drafter over the same prompts, side by side, and what was recorded.

All of them run on one batch of prompts before the next batch begins, in an order that rotates, so
that a machine that slows down slows all alike. In conversations the answers of plain decoding are
fed back: every drafter sees the same prompts.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from dlite.decode import Times, decode
from dlite.drafters.base import Drafter
from dlite.target import TargetModel
from dlite.types import Request, Round, Sampling, SessionKey
from eval.suites import Item

PLAIN = "plain"
TOO_LONG = ("skip", "error")
WARM_UP_TOKENS = 4


@dataclass(kw_only=True)
class Options:
    """How the prompts are decoded."""

    max_new_tokens: int = 128
    batch_size: int = 1
    num_draft: int = 7
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    too_long: str = "skip"
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long is {self.too_long!r}; choose {' or '.join(TOO_LONG)}")
        for name in ("max_new_tokens", "batch_size", "num_draft"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        self.sampling("")  # refuses temperature, top_k and top_p before a target is loaded

    def sampling(self, request_id: str) -> Sampling:
        """Each request has its own stream of random numbers, the same in every run."""
        seed = zlib.crc32(f"{self.seed} {request_id}".encode())
        return Sampling(self.temperature, self.top_k, self.top_p, seed)


@dataclass(frozen=True, slots=True)
class Record:
    """One request as one drafter (or plain decoding) completed it."""

    drafter: str
    category: str
    request: Request
    tokens: list[int]
    finish_reason: str
    rounds: list[Round]

    def to_json(self) -> dict[str, Any]:
        prompt = ",".join(map(str, self.request.prompt)).encode()
        return {
            "drafter": self.drafter,
            "id": self.request.id,
            "category": self.category,
            "prompt_tokens": len(self.request.prompt),
            "prompt_sha256": hashlib.sha256(prompt).hexdigest(),
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "rounds": [[r.drafted, r.accepted, r.emitted, r.cut, r.source] for r in self.rounds],
        }


@dataclass(slots=True)
class Runs:
    """`skipped` are (request id, prompt tokens) of turns too long for the target."""

    records: dict[str, list[Record]]
    times: dict[str, Times]
    skipped: list[tuple[str, int]] = field(default_factory=list)


def collect(
    target: TargetModel,
    drafters: Mapping[str, Drafter | None],
    items: Sequence[Item],
    options: Options,
) -> Runs:
    """Decodes every turn of `items` plainly and with each drafter.

    Raises ValueError for a prompt too long for the target under `too_long=error`, or when all are.
    """
    lanes = {PLAIN: None, **drafters}
    runs = Runs({name: [] for name in lanes}, {name: Times() for name in lanes})
    order = list(lanes)
    for start in tqdm(range(0, len(items), options.batch_size), "batches", disable=None):
        talks = [_Talk(item) for item in items[start : start + options.batch_size]]
        while asked := [(t, r) for t in talks if (r := t.ask(target, options, runs.skipped))]:
            requests = [request for _, request in asked]
            categories = {request.id: talk.item.category for talk, request in asked}
            if not runs.records[PLAIN]:
                for drafter in lanes.values():
                    _warm_up(target, drafter, requests[0], options)
            for name in order:
                _run(target, name, lanes[name], requests, categories, options, runs)
            order = [*order[1:], order[0]]
            for (talk, _), record in zip(asked, runs.records[PLAIN][-len(asked) :], strict=True):
                talk.hear(target, record.tokens)
        for drafter in lanes.values():
            for talk in talks if drafter else ():
                drafter.close(talk.session)
    if not runs.records[PLAIN]:
        raise ValueError(
            f"every prompt is too long for {target.name} ({target.max_length} tokens, of which "
            f"max_new_tokens takes {options.max_new_tokens}); give shorter ones"
        )
    return runs


def _run(
    target: TargetModel,
    name: str,
    drafter: Drafter | None,
    requests: list[Request],
    categories: dict[str, str],
    options: Options,
    runs: Runs,
) -> None:
    result = decode(
        target,
        requests,
        drafter,
        num_draft=options.num_draft,
        batch_size=options.batch_size,
    )
    for done in result.completions:
        assert done.finish_reason is not None
        category = categories[done.request.id]
        runs.records[name].append(
            Record(name, category, done.request, done.tokens, done.finish_reason, done.rounds)
        )
    times = runs.times[name]
    times.draft_seconds += result.times.draft_seconds
    times.verify_seconds += result.times.verify_seconds
    times.total_seconds += result.times.total_seconds


def _warm_up(
    target: TargetModel, drafter: Drafter | None, request: Request, options: Options
) -> None:
    """First calls allocate, pick kernels and build tables: that belongs to no drafter's time."""
    short = replace(
        request,
        id=f"{request.id} warm-up",
        session=None,
        max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens),
    )
    decode(target, [short], drafter, num_draft=options.num_draft, batch_size=1)


class _Talk:
    """A conversation in progress."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.messages = list(item.context)
        self.turns = list(item.turns)  # still to be asked
        self.session = SessionKey("eval", item.id)

    def ask(
        self, target: TargetModel, options: Options, skipped: list[tuple[str, int]]
    ) -> Request | None:
        """The next turn's request; None at the end, or when it is too long for the target."""
        if not self.turns:
            return None
        turn = len(self.item.turns) - len(self.turns) + 1
        name = self.item.id if len(self.item.turns) == 1 else f"{self.item.id}/{turn}"
        self.messages.append(self.turns.pop(0))
        prompt = target.render(self.messages, **options.template_kwargs)
        longest = target.max_length - options.max_new_tokens
        if len(prompt) > longest:
            if options.too_long == "error":
                raise ValueError(
                    f"prompt {name!r} has {len(prompt)} tokens, {target.name} takes {longest} "
                    f"beside max_new_tokens {options.max_new_tokens}; shorten it, or leave such "
                    "prompts out with too_long=skip"
                )
            skipped.append((name, len(prompt)))
            self.turns.clear()
            return None
        sampling = options.sampling(name)
        return Request(
            name, prompt, options.max_new_tokens, sampling=sampling, session=self.session
        )

    def hear(self, target: TargetModel, answer: list[int]) -> None:
        text = target.tokenizer.decode(answer, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
