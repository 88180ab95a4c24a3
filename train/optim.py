"""AdamW as DLite trains with, and a learning rate that is a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.config import OptimConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in parameters if p.requires_grad],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=torch.cuda.is_available(),  # else its temporaries are as large as the weights
    )


def learning_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up, then cosine to 0; `step` counts from 0. Nothing to save or restore."""
    warmup = max(1, round(num_steps * warmup_ratio))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
