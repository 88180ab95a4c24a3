"""A loss that is no number stops the run and says where it came from."""

from __future__ import annotations

import math

from train.stages import Stage


def check_finite(loss: float, stage: Stage, step: int) -> None:
    """Raises ValueError that names the first bad tensor."""
    if math.isfinite(loss):
        return
    named = list(stage.model.named_parameters())
    tensors = [("weights", name, p) for name, p in named]  # a bad weight spoils all gradients
    tensors += [("gradient", name, p.grad) for name, p in named if p.grad is not None]
    for what, name, tensor in tensors:
        if not tensor.isfinite().all():
            raise ValueError(
                f"stage {stage.config.name}, step {step}: loss is {loss}, first bad "
                f"tensor: {what} of {name}; lower optim.learning_rate or check the data"
            )
    raise ValueError(
        f"stage {stage.config.name}, step {step}: loss is {loss} with finite weights and "
        "gradients; the target's states are broken, check its dtype"
    )
