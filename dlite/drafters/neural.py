"""DLite as a drafter: one parallel draft per round from the taps at the anchor, no state at all."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks
from dlite.types import Draft, Request, SessionKey, Verdict, View


@dataclass(kw_only=True)
class NeuralOptions:
    """`draft` is the draft model's folder or hub id; `strict` refuses a target of other weights
    than it was trained for."""

    draft: str
    strict: bool = False


class Uniforms:
    """One stream of random numbers for each sampled request."""

    def __init__(self) -> None:
        self._random: dict[str, random.Random] = {}

    def start(self, request: Request) -> None:
        sampling = request.sampling
        if not sampling.greedy:
            # Without a seed each call must draw anew: a draft that is a function of the request's
            # id is no draw from q, and the accepted tokens would not follow p. With one, the id
            # stays out of it: servers make ids up, and a seed is to repeat its answer.
            key = None if sampling.seed is None else f"draft {sampling.seed}"
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
    model: DraftModel, h_AKD: Tensor, views: list[View], uniforms: Uniforms | None, source: str
) -> list[Draft]:
    """The drafts of views that have room for one, from the states of their blocks. `uniforms` None
    drafts by argmax, and says how sure the model was."""
    longest = min(model.config.num_draft_tokens, max(view.max_draft for view in views))
    anchor_A = torch.tensor([view.tokens[-1] for view in views], device=h_AKD.device)
    confidence_AK = None
    if uniforms is None:
        confidence_AK = h_AKD.new_empty(len(views), longest, dtype=torch.float32)
        tokens_AK, probs = model.decide(h_AKD, anchor_A, longest, confidence_AK=confidence_AK)
    else:
        requests = [view.request for view in views]
        samplings = [request.sampling for request in requests]
        drawn_AK = uniforms.draw(requests, longest)
        tokens_AK, probs = model.decide(h_AKD, anchor_A, longest, samplings, drawn_AK)
    drafts = []
    for view, tokens_K, probs_KV in zip(views, tokens_AK.tolist(), probs, strict=True):
        keep = min(longest, view.max_draft)
        probs_KV = None if probs_KV is None else probs_KV[:keep]
        drafts.append(Draft(tokens_K[:keep], probs_KV, source=source))
    if confidence_AK is not None:
        for draft, confidence_K in zip(drafts, confidence_AK.tolist(), strict=True):
            draft.confidence = confidence_K[: len(draft.tokens)]
    return drafts


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
        self._uniforms = Uniforms()

    def start(self, request: Request) -> None:
        if not self.argmax:
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
        uniforms = None if self.argmax else self._uniforms
        with torch.no_grad():
            h_AKD = self.model.hidden(
                Blocks(anchor_A, torch.stack(taps).to(weight.device, weight.dtype))
            )
        made = drafts_from(self.model, h_AKD, [views[i] for i in rows], uniforms, self.name)
        for i, draft in zip(rows, made, strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._uniforms.finish(request)

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
