"""DLite as a drafter: one parallel draft per round from the taps at the anchor, no state at all."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dlite.model.drafter import Blocks, DraftModel
from dlite.types import Draft, Request, SessionKey, Verdict, View


class Uniforms:
    """One stream of random numbers for each sampled request."""

    def __init__(self) -> None:
        self._random: dict[str, random.Random] = {}

    def start(self, request: Request) -> None:
        sampling = request.sampling
        if not sampling.greedy:
            # Without a seed each call must draw anew: a draft that is a function of the request's
            # id is no draw from q, and the accepted tokens would not follow p.
            key = None if sampling.seed is None else f"draft {sampling.seed} {request.id}"
            self._random[request.id] = random.Random(key)

    def draw(self, requests: list[Request], num_draft: int) -> Tensor:
        """Numbers [A, K] in [0, 1); 0 where a request is greedy."""
        streams = [None if r.sampling.greedy else self._random[r.id] for r in requests]
        return torch.tensor(
            [[s.random() if s else 0.0 for _ in range(num_draft)] for s in streams],
            dtype=torch.float64,
        )

    def finish(self, request: Request) -> None:
        self._random.pop(request.id, None)


def drafts_from(
    model: DraftModel, h_AKD: Tensor, views: list[View], uniforms: Uniforms, source: str
) -> list[Draft]:
    """The drafts of views that have room for one, from the states of their blocks."""
    longest = min(model.config.num_draft_tokens, max(view.max_draft for view in views))
    requests = [view.request for view in views]
    tokens_AK, probs = model.decide(
        h_AKD,
        torch.tensor([view.tokens[-1] for view in views], device=h_AKD.device),
        longest,
        [request.sampling for request in requests],
        uniforms.draw(requests, longest),
    )
    drafts = []
    for view, tokens_K, probs_KV in zip(views, tokens_AK.tolist(), probs, strict=True):
        keep = min(longest, view.max_draft)
        probs_KV = None if probs_KV is None else probs_KV[:keep]
        drafts.append(Draft(tokens_K[:keep], probs_KV, source=source))
    return drafts


class NeuralDrafter:
    """Drafts with a history-free DraftModel that is bound to its target.

    Sampled requests get sampled drafts with their distributions, from the request's own stream of
    random numbers; greedy ones are drafted by argmax. Raises ValueError for a history context.
    """

    def __init__(self, model: DraftModel, name: str = "dlite") -> None:
        if model.config.context != "taps":
            raise ValueError(
                f"a draft model with context {model.config.context!r} keeps a history that this "
                "drafter does not; draft with a context='taps' model"
            )
        self.name, self.model = name, model.eval()
        self.tap_ids = model.config.tap_ids
        self._uniforms = Uniforms()

    def start(self, request: Request) -> None:
        self._uniforms.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = [Draft(source=self.name) for _ in views]
        rows = [i for i, view in enumerate(views) if view.max_draft > 0]
        if not rows:
            return drafts
        taps = []
        for i in rows:
            taps_LD = views[i].taps_LD
            assert taps_LD is not None, "the loop captures the taps that a drafter asks for"
            taps.append(taps_LD)
        weight = self.model.norm.weight
        anchor_A = torch.tensor([views[i].tokens[-1] for i in rows], device=weight.device)
        with torch.no_grad():
            h_AKD = self.model.hidden(
                Blocks(anchor_A, torch.stack(taps).to(weight.device, weight.dtype))
            )
        made = drafts_from(self.model, h_AKD, [views[i] for i in rows], self._uniforms, self.name)
        for i, draft in zip(rows, made, strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._uniforms.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
