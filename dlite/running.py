"""A request while it runs, and what is left of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dlite.types import Request, Round


@dataclass(slots=True)
class Completion:
    """`tokens` are the generated ones, a stop token included. The prefill's token is no round."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0  # of the forward that this request's prompt shared


class Row:
    """A running request: what is committed, its randomness, the taps before its anchor."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt)  # prompt + committed; the last one is the anchor
        self.completion = Completion(request)
        self.taps_LD: Tensor | None = None
        self._generator = torch.Generator()
        if request.sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.sampling.seed)

    @property
    def done(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.completion.tokens)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def commit(self, tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
        """Appends tokens up to the first stop token; returns those kept."""
        assert len(tokens) <= self.remaining
        kept = tokens
        for index, token in enumerate(tokens):
            if token in stop_ids:
                kept = tokens[: index + 1]
                self.completion.finish_reason = "stop"
                break
        self.tokens += kept
        self.completion.tokens += kept
        if self.remaining == 0 and not self.done:
            self.completion.finish_reason = "length"
        return kept
