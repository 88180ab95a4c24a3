"""From logits to the distribution that a token is drawn from, and the draw itself."""

from __future__ import annotations

import torch
from torch import Tensor

from dlite.types import Sampling


def warp(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [N, V] after temperature, top-k and top-p, in this order (as Hugging Face).

    Computed in float32, or float64 when the logits are. Greedy gives one-hot rows on the argmax
    (the first of equal maxima). top-k keeps every token tied with the k-th; top-p keeps the
    smallest set of most probable tokens whose mass reaches `top_p`.
    """
    if sampling.greedy:
        best_N1 = logits_NV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_NV, dtype=torch.float32).scatter_(-1, best_N1, 1.0)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    logits_NV = logits_NV / sampling.temperature
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        kth_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    probs_NV = logits_NV.softmax(-1)
    if sampling.top_p < 1:
        sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
        before_NV = sorted_NV.cumsum(-1) - sorted_NV
        sorted_NV = sorted_NV.masked_fill(before_NV >= sampling.top_p, 0.0)
        probs_NV = torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV)
        probs_NV = probs_NV / probs_NV.sum(-1, keepdim=True)
    return probs_NV


def draw(probs_V: Tensor, uniform: float) -> int:
    """The token whose cell of the cumulative distribution holds `uniform` in [0, 1).

    Never a token of probability 0, whatever the rounding.
    """
    cumulative_V = probs_V.double().cumsum(-1)
    target = uniform * cumulative_V[-1]
    token = int(torch.searchsorted(cumulative_V, target, right=True))
    if token >= len(probs_V) or probs_V[token] <= 0:
        token = int(probs_V.nonzero()[-1])
    return token
