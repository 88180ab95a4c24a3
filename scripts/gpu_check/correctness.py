"""Fast paths against slow, obvious ones, on the device itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.losses import Labels, LossWeights, combine, row_terms, vocab_loss
from dlite.model.masks import Blocks, History
from eval.shapes import PRESETS, Tables

TOLERANCE = 0.03  # relative, in bfloat16


def all_checks(device: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    checks = [flex_is_dense(device), chunked_is_eager(device), overlap_gradient(device)]
    return [check | {"ok": check["error"] < check["limit"]} for check in checks]


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def _history_model(device: str) -> tuple[DraftModel, Blocks, Tensor]:
    config = DraftConfig(
        tap_ids=(0, 1, 3),
        num_target_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        num_hidden_layers=2,
        context="taps+history",
        history_window=64,
        qk_norm=True,
    )
    sizes = PRESETS["tiny"]
    tables = Tables(sizes, torch.bfloat16, device)
    tables.head_weight_VD = torch.randn(512, 256, device=device, dtype=torch.bfloat16) * 0.05
    model = DraftModel(config).to(device, torch.bfloat16)
    model.bind(tables)  # type: ignore[arg-type]
    anchor_rows = torch.arange(5, 300, 9, device=device)
    num = len(anchor_rows)
    history = History(
        torch.randn(320, 3, 256, device=device, dtype=torch.bfloat16),
        anchor_rows,
        torch.where(anchor_rows < 100, 0, 100),
    )
    taps = torch.randn(num, 3, 256, device=device, dtype=torch.bfloat16)
    ids = torch.randint(512, (num, 7), device=device)
    return model, Blocks(ids[:, 0], taps, history), ids


def flex_is_dense(device: str) -> dict[str, Any]:
    """Two packed samples, windows over their starts. On CPU flex has no backward: forward only."""
    model, blocks, prev = _history_model(device)
    wide = copy.deepcopy(model).float()
    wide._embed, wide._head_VD = model._embed, model._head_VD
    with torch.no_grad():
        reference = wide(blocks, prev)
        dense, flex = model(blocks, prev), model(blocks, prev, "flex")
    error = max(relative(dense, reference), relative(flex, reference))
    found: dict[str, Any] = {"check": "flex = dense = float32", "error": error, "limit": TOLERANCE}
    if device == "cuda":
        grads = []
        for form in ("dense", "flex"):
            model.zero_grad()
            model(blocks, prev, form).float().square().mean().backward()
            grads.append(
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            )
        found["gradient_error"] = relative(grads[1], grads[0])
        found["error"] = max(found["error"], found["gradient_error"])
    return found


def _loss_inputs(device: str) -> tuple[Tensor, Tensor, Labels]:
    A, K, F, V = 37, 7, 64, 5000
    features = torch.randn(A, K, F, device=device, requires_grad=True)
    weight = (torch.randn(V, F, device=device) * 0.1).requires_grad_()
    label = torch.randint(V, (A, K), device=device)
    valid = torch.rand(A, K, device=device).gt(0.1).cumprod(-1).bool()
    return features, weight, Labels(label, label, valid, torch.randn(A, K, 96, device=device))


def chunked_is_eager(device: str) -> dict[str, Any]:
    """Loss and gradients of CE + TV + tau with and without all logits at once."""
    features, weight, labels = _loss_inputs(device)
    head = torch.randn(len(weight), 96, device=device) * 0.1
    loss, totals = LossWeights(ce=0.1, tv=1.0, tau=0.2), labels.weights(4.0)

    def log_p(rows: slice) -> Tensor:
        return (labels.state_AKD.flatten(0, 1)[rows] @ head.T).log_softmax(-1)

    chunked, _ = vocab_loss(
        features, weight, labels, loss, totals, 4.0, target=log_p, chunk_elements=8 * len(weight)
    )
    ours = torch.autograd.grad(chunked, (features, weight))
    logits = features.flatten(0, 1) @ weight.T
    terms = row_terms(logits, labels.draft_label_AK.flatten(), log_p(slice(None)), None)
    eager = combine(terms, loss, labels.decay(4.0), totals)
    theirs = torch.autograd.grad(eager, (features, weight))
    error = max(relative(a, b) for a, b in zip((chunked, *ours), (eager, *theirs), strict=True))
    return {"check": "chunked loss = eager loss", "error": error, "limit": 1e-4}


def overlap_gradient(device: str) -> dict[str, Any]:
    """N1: bfloat16 features under autocast, p and q at an overlap of 0.98, against float64."""
    V, F = 5000, 64
    features = torch.randn(64, 1, F, device=device)
    weight = torch.randn(V, F, device=device) * 0.1
    log_p = (features[:, 0] @ weight.T + 0.05 * torch.randn(64, V, device=device)).double()
    log_p = log_p.log_softmax(-1)
    label = torch.zeros(64, 1, dtype=torch.long, device=device)
    labels = Labels(label, label, torch.ones_like(label, dtype=torch.bool), features)
    grads = []
    features = features.bfloat16()
    for dtype in (torch.float64, torch.float32):
        given = (features.double() if dtype == torch.float64 else features).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
            total, stats = vocab_loss(
                given,
                weight.to(dtype),
                labels,
                LossWeights(tv=1.0),
                {"ce": 64.0, "kl": 64.0, "tv": 64.0, "tau": 64.0},
                target=lambda rows, dtype=dtype: log_p[rows].to(dtype),
            )
        grads.append(torch.autograd.grad(total, given)[0])
    return {
        "check": "bfloat16 gradient of TV at high overlap",
        "error": relative(grads[1], grads[0]),
        "limit": 0.01,
        "overlap": float(stats["overlap"].sum() / 64),
    }
