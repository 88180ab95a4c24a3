"""The vocabulary losses, chunked: no float32 tensor of all positions times the vocabulary lives.

For every block position i = 1..K (DESIGN 3.5): features of h_i, label x_{a+i}, the target's
distribution p_i at row a+i-1, weight w_i = exp(-(i-1)/gamma) up to the block's first unsupervised
token. q lives on the draft vocabulary; p is never renormalised, so 1 - TV/2 stays the true
acceptance rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 8 * 2**20  # of one [rows, V] float32 tensor: 32 MB; a handful live at a time


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Coefficients of the terms: cross-entropy, forward KL to the teacher, total variation
    sum |p - q| (without 1/2) to the target, and the direct -E[tau]."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    tau: float = 0.0

    def __post_init__(self) -> None:
        if not any((self.ce, self.kl, self.tv, self.tau)):
            raise ValueError("a stage's loss has no term; give a weight to ce, kl, tv or tau")


@dataclass(slots=True)
class Labels:
    """What the blocks are held against. A blocks of K positions.

    `label_AK`: target ids x_{a+i}. `draft_label_AK`: the same as draft ids, -1 outside the draft
    vocabulary. `valid_AK`: cumulative supervision. `state_AKD`: the target's post-norm states at
    rows a+i-1. `log_z_AK`: log-normalisers of their full-vocabulary logits, None: computed here.
    """

    label_AK: Tensor
    draft_label_AK: Tensor
    valid_AK: Tensor
    state_AKD: Tensor
    log_z_AK: Tensor | None = None

    def decay(self, gamma: float) -> Tensor:
        """Weights w_i [A, K], zero behind the first unsupervised token."""
        step_K = torch.arange(self.label_AK.shape[1], device=self.label_AK.device)
        return self.valid_AK * torch.exp(-step_K / gamma)

    def weights(self, gamma: float) -> dict[str, float]:
        """Total weight of each loss term: what global sums are divided by. In float64, so that they
        do not depend on how a batch is split."""
        w_AK = self.decay(gamma).double()
        covered = float((w_AK * (self.draft_label_AK >= 0)).sum())
        total = float(w_AK.sum())
        return {"ce": covered, "kl": total, "tv": total, "tau": float(self.valid_AK[:, 0].sum())}


LogProbs = Callable[[slice], Tensor]  # rows of the flattened A*K -> log probabilities [rows, Dv]


def target_log_probs(
    labels: Labels,
    target_logits: Callable[..., Tensor],
    draft_ids: Tensor | None,
    draft_head_VD: Tensor,
) -> LogProbs:
    """log p on the draft ids, un-renormalised. With known normalisers only the draft ids' rows of
    the LM head are read. `draft_ids` None: the whole vocabulary."""
    state_ND = labels.state_AKD.flatten(0, 1)
    log_z_N = None if labels.log_z_AK is None else labels.log_z_AK.flatten()

    @torch.no_grad()
    def log_probs(rows: slice) -> Tensor:
        if log_z_N is not None:
            return target_logits(state_ND[rows], draft_head_VD) - log_z_N[rows, None]
        log_p_NV = target_logits(state_ND[rows]).log_softmax(-1)
        return log_p_NV if draft_ids is None else log_p_NV[:, draft_ids]

    return log_probs


def row_terms(
    logits_NV: Tensor, draft_label_N: Tensor, log_p_NV: Tensor | None, log_h_NV: Tensor | None
) -> dict[str, Tensor]:
    """The plain loss terms of N rows, each [N], from float32 draft logits.

    `ce` is 0 where the label is outside the draft vocabulary (-1). `tv` counts the target's mass
    outside it, where q is 0. `kl` is over the draft vocabulary, which the teacher shares.
    """
    log_q_NV = logits_NV.log_softmax(-1)
    inside_N = draft_label_N >= 0
    picked_N = log_q_NV.gather(-1, draft_label_N.clamp(min=0)[:, None]).squeeze(-1)
    terms = {"ce": -picked_N.where(inside_N, torch.zeros_like(picked_N))}
    if log_p_NV is not None:
        p_NV = log_p_NV.exp()
        outside_N = (1 - p_NV.sum(-1)).clamp(min=0)
        terms["tv"] = (p_NV - log_q_NV.exp()).abs().sum(-1) + outside_N
    if log_h_NV is not None:
        terms["kl"] = (log_h_NV.exp() * (log_h_NV - log_q_NV)).sum(-1)
    return terms


def expected_tau(tv_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """E~[tau] = 1 + sum_k prod_{j<=k} (1 - TV_j / 2) per anchor, on the true path."""
    return 1 + survival(tv_AK, valid_AK).sum(-1)


def survival(tv_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """Probability [A, K] that the first k draft tokens are all accepted, on the true path."""
    return ((1 - tv_AK / 2) * valid_AK).cumprod(-1)


def combine(
    terms: dict[str, Tensor], loss: LossWeights, decay_AK: Tensor, totals: dict[str, float]
) -> Tensor:
    """The scalar loss of whole blocks: each term's weighted sum over its global total weight."""
    shape = decay_AK.shape
    total = terms["ce"].new_zeros(())
    for name in ("ce", "kl", "tv"):
        if getattr(loss, name):
            weighted = (decay_AK * terms[name].view(shape)).sum() / max(totals[name], 1e-9)
            total = total + getattr(loss, name) * weighted
    if loss.tau:
        valid_AK = (decay_AK > 0).to(total.dtype)
        tau_A = expected_tau(terms["tv"].view(shape), valid_AK) * valid_AK[:, 0]
        total = total - loss.tau * tau_A.sum() / max(totals["tau"], 1e-9)
    return total


def wide(logits_NV: Tensor) -> Tensor:
    """In float32 at least: half precision cancels where p and q are close."""
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    """Runs `block_loss` chunk by chunk and keeps only gradients: logits are never all alive."""

    @staticmethod
    def forward(ctx, features_NF: Tensor, weight_VF: Tensor, block_loss, chunk: int) -> Tensor:
        needs = ctx.needs_input_grad
        grad_features = torch.zeros_like(features_NF) if needs[0] else None
        wider = torch.promote_types(weight_VF.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight_VF, dtype=wider) if needs[1] else None
        total = torch.zeros((), device=features_NF.device, dtype=wider)
        device = features_NF.device.type
        for start in range(0, len(features_NF), chunk):
            rows = slice(start, min(start + chunk, len(features_NF)))
            # Under autocast the product would be rounded to bfloat16: a TV gradient is then off by
            # a quarter where p and q overlap by 0.98 (scripts/gpu_check).
            with torch.enable_grad(), torch.autocast(device, enabled=False):
                features = features_NF[rows].detach().requires_grad_(needs[0])
                weight = weight_VF.detach().requires_grad_(needs[1])
                loss = block_loss(wide(features.to(weight.dtype) @ weight.T), rows)
            inputs = [x for x in (features, weight) if x.requires_grad]
            grads = list(torch.autograd.grad(loss, inputs)) if inputs else []
            if grad_features is not None:
                grad_features[rows] = grads.pop(0)
            if grad_weight is not None:
                grad_weight += grads.pop(0)
            total += loss.detach()
        ctx.grads = grad_features, None if grad_weight is None else grad_weight.to(weight_VF.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = (None if g is None else g * grad_output for g in ctx.grads)
        return *grads, None, None


def vocab_loss(
    features_AKF: Tensor,
    weight_VF: Tensor,
    labels: Labels,
    loss: LossWeights,
    totals: dict[str, float],
    gamma: float = 4.0,
    target: LogProbs | None = None,
    teacher: LogProbs | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of A blocks (a scalar, already divided by `totals`) and statistics for the log.

    Statistics are sums over valid rows by position [K]: `num`, `hits` (argmax equals the label),
    `overlap` (1 - TV/2) and `survival` (its running product over a block) where the target was
    given, `ce`.
    """
    num_draft = labels.label_AK.shape[1]
    decay_AK = labels.decay(gamma)
    draft_label_N = labels.draft_label_AK.flatten()
    stats = {
        name: torch.zeros(num_draft, device=features_AKF.device)
        for name in ("num", "covered", "hits", "overlap", "survival", "ce")
    }

    def block_loss(logits_NV: Tensor, rows: slice) -> Tensor:
        blocks = slice(rows.start // num_draft, rows.stop // num_draft)
        terms = row_terms(
            logits_NV,
            draft_label_N[rows],
            target(rows) if target else None,
            teacher(rows) if teacher else None,
        )
        valid_AK = labels.valid_AK[blocks]
        with torch.no_grad():
            best_AK = logits_NV.argmax(-1).view(-1, num_draft)
            stats["num"] += valid_AK.sum(0)
            stats["covered"] += (valid_AK * (labels.draft_label_AK[blocks] >= 0)).sum(0)
            stats["hits"] += (valid_AK * (best_AK == labels.draft_label_AK[blocks])).sum(0)
            stats["ce"] += (valid_AK * terms["ce"].view(-1, num_draft)).sum(0)
            if "tv" in terms:
                tv_AK = terms["tv"].view(-1, num_draft)
                stats["overlap"] += (valid_AK * (1 - tv_AK / 2)).sum(0)
                stats["survival"] += survival(tv_AK, valid_AK).sum(0)
        return combine(terms, loss, decay_AK[blocks], totals)

    blocks_per_chunk = max(1, chunk_elements // (len(weight_VF) * num_draft))
    features_NF = features_AKF.flatten(0, 1)
    total = _Chunked.apply(features_NF, weight_VF, block_loss, blocks_per_chunk * num_draft)
    return total, stats  # type: ignore[return-value]
