"""DLite as a drafter: one parallel draft per round from the taps at the anchor, no state at all."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from dlite.model.drafter import Blocks, DraftModel
from dlite.types import Draft, Request, SessionKey, Verdict, View


@dataclass(kw_only=True)
class NeuralOptions:
    """`draft` is the draft model's folder or hub id; `strict` refuses a target of other weights
    than it was trained for."""

    draft: str
    strict: bool = False


class NeuralDrafter:
    """Drafts with a history-free DraftModel that is bound to its target.

    Sampled requests get sampled drafts with their distributions, from the request's own stream of
    random numbers; greedy ones are drafted by argmax. `argmax`: all are, as point masses with the
    model's confidence, which is what a planner may cut. Raises ValueError for a history context.
    """

    def __init__(self, model: DraftModel, name: str = "dlite", *, argmax: bool = False) -> None:
        if model.config.context != "taps":
            raise ValueError(
                f"a draft model with context {model.config.context!r} keeps a history that this "
                "drafter does not; draft with a context='taps' model"
            )
        self.name, self.model, self.argmax = name, model.eval(), argmax
        self.tap_ids = model.config.tap_ids
        self._random: dict[str, random.Random] = {}

    def start(self, request: Request) -> None:
        sampling = request.sampling
        if not sampling.greedy and not self.argmax:
            # Without a seed each call must draw anew: a draft that is a function of the request's
            # id is no draw from q, and the accepted tokens would not follow p. With one, the id
            # stays out of it: servers make ids up, and a seed is to repeat its answer.
            key = None if sampling.seed is None else f"draft {sampling.seed}"
            self._random[request.id] = random.Random(key)

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = [Draft(source=self.name) for _ in views]
        rows = [i for i, view in enumerate(views) if view.max_draft > 0]
        if not rows:
            return drafts
        num_draft = self.model.config.num_draft_tokens
        longest = min(num_draft, max(views[i].max_draft for i in rows))
        taps = []
        for i in rows:
            taps_LD = views[i].taps_LD
            assert taps_LD is not None, "the loop captures the taps that a drafter asks for"
            taps.append(taps_LD)
        weight = self.model.norm.weight
        anchor_A = torch.tensor([views[i].tokens[-1] for i in rows], device=weight.device)
        blocks = Blocks(anchor_A, torch.stack(taps).to(weight.device, weight.dtype))
        if self.argmax:
            confidence_AK = torch.empty(len(rows), longest, device=weight.device)
            tokens_AK, probs = self.model.draft(blocks, longest, confidence_AK=confidence_AK)
            for i, confidence_K in zip(rows, confidence_AK.tolist(), strict=True):
                drafts[i].confidence = confidence_K[: views[i].max_draft]
        else:
            requests = [views[i].request for i in rows]
            samplings = [request.sampling for request in requests]
            uniforms = self._uniforms(requests, longest)
            tokens_AK, probs = self.model.draft(blocks, longest, samplings, uniforms)
        for i, tokens_K, probs_KV in zip(rows, tokens_AK.tolist(), probs, strict=True):
            keep = min(longest, views[i].max_draft)
            drafts[i].tokens = tokens_K[:keep]
            drafts[i].probs_KV = None if probs_KV is None else probs_KV[:keep]
        return drafts

    def _uniforms(self, requests: list[Request], num_draft: int) -> torch.Tensor:
        streams = [None if r.sampling.greedy else self._random[r.id] for r in requests]
        return torch.tensor(
            [[s.random() if s else 0.0 for _ in range(num_draft)] for s in streams],
            dtype=torch.float64,
        )

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._random.pop(request.id, None)

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
