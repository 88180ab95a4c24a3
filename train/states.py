"""Where the target's hidden states come from: the live target, or a copy kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from dlite.target import TargetModel
from train.data import Sample

LOG_Z_ROWS = 512  # rows of full-vocabulary logits alive at once


class States(Protocol):
    """States [S, C, D] of samples, the C layers in `layer_ids` order, and log-normalisers [S]."""

    layer_ids: tuple[int, ...]

    def get(self, samples: Sequence[Sample]) -> list[Tensor]: ...

    def log_z(self, samples: Sequence[Sample]) -> list[Tensor] | None: ...


class LiveStates:
    """Every state from a forward of the target, when it is asked for. Nothing is kept."""

    def __init__(self, target: TargetModel, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids = target, layer_ids

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        ids = [s.input_ids for s in samples]
        return self.target.capture(ids, self.layer_ids, device=self.target.device)

    def log_z(self, samples: Sequence[Sample]) -> None:
        return None


class KeptStates:
    """The states of a few samples, asked for once."""

    def __init__(self, states: States, samples: Sequence[Sample]) -> None:
        self.layer_ids = states.layer_ids
        captured, log_z = states.get(samples), states.log_z(samples)
        self._states = {s.id: x.cpu() for s, x in zip(samples, captured, strict=True)}
        self._log_z = (
            None if log_z is None else {s.id: x for s, x in zip(samples, log_z, strict=True)}
        )

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self._states[s.id] for s in samples]

    def log_z(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        return None if self._log_z is None else [self._log_z[s.id] for s in samples]


class MemoryStates:
    """All states captured once, for runs small enough; also each row's log-normaliser, so that
    a pruned vocabulary never needs the full LM head again.

    Raises ValueError when they would take more than `limit_bytes`.
    """

    def __init__(
        self,
        target: TargetModel,
        layer_ids: tuple[int, ...],
        samples: Sequence[Sample],
        limit_bytes: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self.layer_ids = layer_ids
        num_tokens = sum(len(s.input_ids) for s in samples)
        size = num_tokens * len(layer_ids) * target.hidden_size * 4
        num_layers, gigabytes = len(layer_ids), size / 1e9
        say(f"states in memory: {num_tokens:,} positions x {num_layers} layers, {gigabytes:.2f} GB")
        if size > limit_bytes:
            raise ValueError(
                f"data.states=memory would take {size / 1e9:.1f} GB; raise data.states_limit_gb "
                f"above {limit_bytes / 1e9:.1f}, train on fewer samples, or use data.states=live"
            )
        self._states: dict[str, Tensor] = {}
        self._log_z: dict[str, Tensor] = {}
        order = sorted(samples, key=lambda s: len(s.input_ids))
        with tqdm(total=num_tokens, desc="target states", unit="tok", unit_scale=True) as bar:
            for i in range(0, len(order), 16):
                batch = order[i : i + 16]
                captured = target.capture([s.input_ids for s in batch], layer_ids)
                for sample, states_SCD in zip(batch, captured, strict=True):
                    self._states[sample.id] = states_SCD.float()
                    self._log_z[sample.id] = log_normalisers(target, sample, states_SCD)
                    bar.update(len(sample.input_ids))

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self._states[s.id] for s in samples]

    def log_z(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self._log_z[s.id] for s in samples]


@torch.no_grad()
def log_normalisers(target: TargetModel, sample: Sample, states_SCD: Tensor) -> Tensor:
    """logsumexp of the full-vocabulary logits at rows whose next token is supervised, else 0."""
    log_z_S = torch.zeros(len(states_SCD))
    rows = torch.tensor(sample.loss_mask[1:], dtype=torch.bool).nonzero().squeeze(-1)
    for part in rows.split(LOG_Z_ROWS):
        logits = target.logits(states_SCD[part, -1].to(target.device))
        log_z_S[part] = logits.logsumexp(-1).cpu()
    return log_z_S
