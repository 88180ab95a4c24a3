"""Speculative decoding of many requests at once, each advancing by its own accepted counts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite.drafters.base import Drafter, ReadsHistory
from dlite.hybrid import Hybrid
from dlite.planner import Chooser, Planner
from dlite.running import Completion, Row
from dlite.sampling import warp
from dlite.taps import check_taps
from dlite.target import TargetModel
from dlite.types import Draft, Request, Round, Verdict, View
from dlite.verify import verify, verify_greedy

PREFILL_TOKENS = 8192  # padded prompt tokens per prefill forward; bounds its memory
OnTokens = Callable[[Request, list[int]], None]


@dataclass(slots=True)
class Times:
    """Wall-clock of a `decode` call. Verifying covers the target's forward, its logits and the
    verdicts; the prefills are part of `other_seconds`."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def other_seconds(self) -> float:
        return self.total_seconds - self.draft_seconds - self.verify_seconds


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Completions in the order of the requests."""

    completions: list[Completion]
    times: Times


@torch.no_grad()
def decode(
    target: TargetModel,
    requests: Iterable[Request],
    drafter: Drafter | Sequence[Drafter] | None,
    *,
    planner: Chooser | None = None,
    num_draft: int = 7,
    batch_size: int = 8,
    on_tokens: OnTokens | None = None,
) -> DecodeResult:
    """Complete each request with the target's own tokens; `drafter` None is plain decoding.

    Of several drafters, or with a `planner`, it decides whose tokens are verified and how many.

    A request ends at one of its stop ids, at one of the target's end ids, or at its length limit.
    A finished row's place goes to the next request. `on_tokens` is told of new tokens at once.
    Raises ValueError for a request that can't fit into the target's longest sequence.
    """
    requests = list(requests)
    if planner is not None or isinstance(drafter, Sequence):
        drafters = drafter if isinstance(drafter, Sequence) else [d for d in (drafter,) if d]
        drafter = Hybrid(drafters, planner or Planner())
    _check(target, requests, num_draft, batch_size)
    loop = _Loop(target, drafter, num_draft, min(batch_size, len(requests)), on_tokens)
    rows = [Row(request) for request in requests]
    start = time.perf_counter()
    try:
        waiting = deque(rows)
        while waiting or loop.rows:
            while loop.has_room and waiting:
                loop.admit(waiting)
            if loop.rows:
                loop.round()
    finally:
        for row in loop.rows:  # an interrupt leaves some that are still running
            if drafter is not None and not row.done:
                drafter.abort(row.request)
    loop.times.total_seconds = time.perf_counter() - start
    return DecodeResult([row.completion for row in rows], loop.times)


def _check(
    target: TargetModel, requests: Sequence[Request], num_draft: int, batch_size: int
) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give at least 1")
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}; give at least 0 (0: no drafts)")
    for request in requests:
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"request {request.id!r} has {len(request.prompt)} prompt tokens and "
                f"max_new_tokens {request.max_new_tokens}; both must be at least 1"
            )
        target.check_length(
            len(request.prompt) + request.max_new_tokens,
            what=f"request {request.id!r}: prompt + max_new_tokens",
        )


class _Loop:
    """The rows that run now, one row of the cache each."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        num_draft: int,
        batch_size: int,
        on_tokens: OnTokens | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.num_draft = num_draft
        self.batch_size = batch_size
        self.on_tokens = on_tokens
        self.tap_ids = drafter.tap_ids if drafter is not None else ()
        self.reader = drafter if isinstance(drafter, ReadsHistory) else None
        self.rows: list[Row] = []
        self.cache = target.new_cache(batch_size, 256)
        self.cache.select([])
        self.times = Times()

    @property
    def has_room(self) -> bool:
        return len(self.rows) < self.batch_size

    def admit(self, waiting: deque[Row]) -> None:
        """Prefills as many waiting rows as there is room for and commits their first tokens."""
        new = [waiting.popleft()]
        width = len(new[0].tokens)
        while waiting and len(self.rows) + len(new) < self.batch_size:
            width = max(width, len(waiting[0].tokens))
            if width * (len(new) + 1) > PREFILL_TOKENS:
                break
            new.append(waiting.popleft())
        self.rows += new
        for row in new:
            if self.drafter is not None:
                self.drafter.start(row.request)
        start = time.perf_counter()
        counts = [len(row.tokens) for row in new]
        cache = self.target.new_cache(len(new), max(counts))
        tokens_BT = self.target.pad([row.tokens for row in new])
        out = self.target.forward(tokens_BT, cache, counts_B=counts, tap_ids=self.tap_ids)
        cache.advance(counts)
        last_B = torch.tensor(counts, device=self.target.device) - 1
        logits_BV = self.target.logits(out.hidden_BTD[torch.arange(len(new)), last_B])
        self._take_taps(new, out.taps_BTLD, last_B)
        self._show_history(new, out.taps_BTLD, counts)
        verdicts = judge(new, [Draft()] * len(new), logits_BV)
        seconds = time.perf_counter() - start
        for row, verdict in zip(new, verdicts, strict=True):
            row.completion.prefill_seconds = seconds
            self._commit(row, [verdict.next_token])
        self.cache.extend(cache)
        self._drop_finished()

    def round(self) -> None:
        """One draft and its verification for every running row."""
        start = time.perf_counter()
        drafts = self._propose()
        drafted = time.perf_counter()
        counts = [1 + len(draft.tokens) for draft in drafts]
        tokens_BT = self.target.pad(
            [[row.tokens[-1], *draft.tokens] for row, draft in zip(self.rows, drafts, strict=True)]
        )
        out = self.target.forward(tokens_BT, self.cache, counts_B=counts, tap_ids=self.tap_ids)
        count_B = torch.tensor(counts, device=self.target.device)
        used_BT = torch.arange(max(counts), device=self.target.device) < count_B.unsqueeze(1)
        verdicts = judge(self.rows, drafts, self.target.logits(out.hidden_BTD[used_BT]))
        accepted = [verdict.num_accepted for verdict in verdicts]
        self.cache.advance([n + 1 for n in accepted])
        accepted_B = torch.tensor(accepted, device=self.target.device)
        self._take_taps(self.rows, out.taps_BTLD, accepted_B)
        verified = time.perf_counter()
        self._show_history(self.rows, out.taps_BTLD, [n + 1 for n in accepted])
        self.times.draft_seconds += drafted - start + time.perf_counter() - verified
        self.times.verify_seconds += verified - drafted
        for row, draft, verdict in zip(self.rows, drafts, verdicts, strict=True):
            self._end_round(row, draft, verdict)
        self._drop_finished()

    def _propose(self) -> list[Draft]:
        if self.drafter is None:
            return [Draft()] * len(self.rows)
        views = [
            View(row.request, row.tokens, min(self.num_draft, row.remaining - 1), row.taps_LD)
            for row in self.rows
        ]
        drafts = self.drafter.propose(views)
        return [draft.cut(view.max_draft) for draft, view in zip(drafts, views, strict=True)]

    def _take_taps(self, rows: Sequence[Row], taps_BTLD: Tensor | None, at_B: Tensor) -> None:
        if taps_BTLD is None:
            return
        taps_BLD = taps_BTLD[torch.arange(len(rows), device=at_B.device), at_B]
        check_taps(taps_BLD, self.tap_ids)
        for row, taps_LD in zip(rows, taps_BLD, strict=True):
            row.taps_LD = taps_LD

    def _show_history(
        self, rows: Sequence[Row], taps_BTLD: Tensor | None, counts: list[int]
    ) -> None:
        if self.reader is None:
            return
        assert taps_BTLD is not None, "a drafter with a history names the layers that it reads"
        for row_TLD, count in zip(taps_BTLD, counts, strict=True):
            check_taps(row_TLD[:count], self.tap_ids)
        self.reader.read([row.request for row in rows], taps_BTLD, counts)

    def _end_round(self, row: Row, draft: Draft, verdict: Verdict) -> None:
        if self.drafter is not None:
            self.drafter.observe(row.request, draft, verdict)
        accepted = draft.tokens[: verdict.num_accepted]
        emitted = len(self._commit(row, [*accepted, verdict.next_token]))
        row.completion.rounds.append(
            Round(
                request_id=row.request.id,
                drafted=len(draft.tokens),
                accepted=min(len(accepted), emitted),
                emitted=emitted,
                cut=row.done,
                source=draft.source,
            )
        )

    def _commit(self, row: Row, tokens: list[int]) -> list[int]:
        kept = row.commit(tokens, row.request.stop_ids | self.target.eos_ids)
        if self.on_tokens is not None:
            self.on_tokens(row.request, kept)
        if row.done and self.drafter is not None:
            self.drafter.finish(row.request)
        return kept

    def _drop_finished(self) -> None:
        """Fills the places of finished rows from the end, so that few cache rows move."""
        live = [i for i, row in enumerate(self.rows) if not row.done]
        if len(live) == len(self.rows):
            return
        order = list(range(len(live)))
        holes = [i for i in order if self.rows[i].done]
        for hole, moved in zip(holes, [i for i in live if i >= len(live)], strict=True):
            order[hole] = moved
        self.rows = [self.rows[i] for i in order]
        self.cache.select(order)


def judge(rows: Sequence[Row], drafts: Sequence[Draft], logits_NV: Tensor) -> list[Verdict]:
    """`logits_NV` holds K+1 rows for each request, one request after the other."""
    argmax_N = logits_NV.argmax(-1).tolist()
    verdicts = []
    end = 0
    for row, draft in zip(rows, drafts, strict=True):
        start, end = end, end + len(draft.tokens) + 1
        if row.request.sampling.greedy:
            verdicts.append(verify_greedy(argmax_N[start:end], draft.tokens))
        else:
            p_NV = warp(logits_NV[start:end], row.request.sampling)
            verdicts.append(verify(p_NV, draft, row.uniform))
    return verdicts


@torch.no_grad()
def top2_margins(target: TargetModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far the best logit leads the second one at each generated position, teacher-forced.

    Where two runs' outputs first differ, a margin near 0 says that rounding decided.
    """
    ids = [*prompt, *tokens[:-1]]
    out = target.forward(target.pad([ids]), target.new_cache(1, len(ids)))
    best_N2 = target.logits(out.hidden_BTD[0, len(prompt) - 1 :]).topk(2, dim=-1).values
    return (best_N2[:, 0] - best_N2[:, 1]).tolist()
