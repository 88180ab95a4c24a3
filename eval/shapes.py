"""What a draft round costs the drafter, for DLite and for drafters that keep a history.

A history drafter owes its state some upkeep in every round: the context features of the newly
committed tokens become keys and values of every draft layer. To measure these baselines at their
best, their cache is written in place and never copied, and grouped queries share one pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dlite.drafters.neural import NeuralDrafter
from dlite.model.backbone import Attention, Layer, sdpa
from dlite.model.config import DraftConfig, default_tap_ids
from dlite.model.drafter import DraftModel
from dlite.model.heads import LowRankHead, MarkovHead
from dlite.target import TargetModel, check_taps
from dlite.types import Request, View


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a draft model takes from its target."""

    num_target_layers: int
    num_taps: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool = False


PRESETS = {
    "tiny": Sizes(4, 4, 64, 128, 4, 2, 16, 512),
    "smollm2": Sizes(30, 8, 576, 1536, 9, 3, 64, 49152),
    "qwen3-4b": Sizes(36, 12, 2560, 9728, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-8b": Sizes(36, 14, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
}

HISTORY: dict[str, Any] = {"context": "history", "composition": "feature", "history_window": 0}
# DSpark's correction has rank 256 in its published configurations.
SHAPES: dict[str, dict[str, Any]] = {
    "dlite": {"context": "taps", "composition": "sequence", "head": "lowrank"},
    "dflash": {**HISTORY, "head": "none"},
    "dspark": {**HISTORY, "head": "markov", "first_predictor": "anchor", "rank": 256},
}


class Tables:
    """An untrained target's embedding table and LM head, one tensor: all that a draft borrows."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.head_weight_VD = torch.empty(
            sizes.vocab_size, sizes.hidden_size, dtype=dtype, device=device
        ).uniform_(-0.05, 0.05)
        self.num_token_ids = sizes.vocab_size

    def embed(self, ids: Tensor) -> Tensor:
        return self.head_weight_VD[ids]


def build_model(
    shape: str, sizes: Sizes, num_layers: int, num_draft: int, tables: Tables
) -> DraftModel:
    """A random draft model of that shape, bound to the tables."""
    weight = tables.head_weight_VD
    model = DraftModel(draft_config(shape, sizes, num_layers, num_draft))
    return model.to(weight.device, weight.dtype).eval().bind(cast(TargetModel, tables))


def draft_config(shape: str, sizes: Sizes, num_layers: int, num_draft: int) -> DraftConfig:
    return DraftConfig(
        tap_ids=default_tap_ids(sizes.num_target_layers, sizes.num_taps),
        num_target_layers=sizes.num_target_layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        qk_norm=sizes.qk_norm,
        num_hidden_layers=num_layers,
        num_draft_tokens=num_draft,
        **SHAPES[shape],
    )


class Rounds(Protocol):
    """Draft rounds at any context length."""

    def state_bytes(self, context: int) -> int:
        """What the drafter must keep of a context of that length."""
        ...

    def round(self, context: int, taps_BTLD: Tensor, num_new: int) -> list[list[int]]:
        """Drafts behind `context` tokens, the last `num_new` of which a verification has just
        added. `taps_BTLD` are the states of that verification's rows."""
        ...


class TapsRounds:
    """DLite through the very drafter that decoding uses."""

    def __init__(self, model: DraftModel, batch_size: int, contexts: Sequence[int]) -> None:
        self.drafter = NeuralDrafter(model)
        vocab_size, num_draft = model.config.vocab_size, model.config.num_draft_tokens
        self.requests = {
            context: [
                Request(f"{context}-{row}", tokens, num_draft + 1)
                for row, tokens in enumerate(
                    torch.randint(vocab_size, (batch_size, context + 1)).tolist()
                )
            ]
            for context in contexts
        }

    def state_bytes(self, context: int) -> int:
        return 0

    def round(self, context: int, taps_BTLD: Tensor, num_new: int) -> list[list[int]]:
        taps_BLD = taps_BTLD[:, num_new - 1]
        check_taps(taps_BLD, self.drafter.tap_ids)
        views = [
            View(request, request.prompt, request.max_new_tokens - 1, taps_LD)
            for request, taps_LD in zip(self.requests[context], taps_BLD, strict=True)
        ]
        return [draft.tokens for draft in self.drafter.propose(views)]


class HistoryRounds:
    """DFlash and DSpark: keys and values of every earlier position in every draft layer."""

    def __init__(
        self, model: DraftModel, head_VD: Tensor, batch_size: int, contexts: Sequence[int]
    ) -> None:
        self.model, self.head_VD = model, head_VD
        c = model.config
        self.anchor_B = torch.zeros(batch_size, dtype=torch.long, device=head_VD.device)
        layers = [cast(Layer, layer) for layer in model.layers]
        self.number = {layer.self_attn: i for i, layer in enumerate(layers)}
        capacity = max(contexts) + c.num_draft_tokens + 1
        shape = (batch_size, c.num_key_value_heads, capacity, c.head_dim)
        self.keys, self.values = (
            [head_VD.new_empty(shape).normal_() for _ in layers] for _ in range(2)
        )

    def state_bytes(self, context: int) -> int:
        return sum(x[:, :, :context].numel() * x.element_size() for x in self.keys + self.values)

    def extend(self, start: int, features_BTLD: Tensor) -> None:
        """Writes the keys and values of positions from `start` on."""
        batch_size, num_new = features_BTLD.shape[:2]
        vectors_BTD = self.model.history_vectors(features_BTLD.flatten(0, 1)).unflatten(
            0, (batch_size, num_new)
        )
        end = start + num_new
        position_BT = torch.arange(start, end, device=self.head_VD.device).expand(batch_size, -1)
        for attention, i in self.number.items():
            keys, values = attention.keys_values(vectors_BTD, position_BT)
            self.keys[i][:, :, start:end] = keys
            self.values[i][:, :, start:end] = values

    @torch.no_grad()
    def round(self, context: int, taps_BTLD: Tensor, num_new: int) -> list[list[int]]:
        features_BTLD = taps_BTLD[:, :num_new]
        check_taps(features_BTLD.flatten(0, 1), self.model.config.tap_ids)
        self.extend(context - num_new, features_BTLD)
        layer = 0

        def nothing_to_copy(attention: Attention) -> tuple[Tensor, Tensor]:
            nonlocal layer
            layer = self.number[attention]
            return self.keys[layer][:, :, :0], self.values[layer][:, :, :0]

        def attend(q: Tensor, k_own: Tensor, v_own: Tensor, mask: Tensor | None) -> Tensor:
            """Queries of one key head side by side: one pass over its keys instead of several."""
            end = context + k_own.shape[2]
            self.keys[layer][:, :, context:end] = k_own
            self.values[layer][:, :, context:end] = v_own
            keys, values = self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
            return sdpa(grouped, keys, values, mask).reshape(q.shape)

        h_BKD = self.model.attend(
            self.anchor_B,
            torch.full_like(self.anchor_B, context),
            nothing_to_copy,
            form=attend,
        )
        head = self.model.sequential_head
        correction = head if isinstance(head, MarkovHead) else None
        return draft_full_logits(h_BKD, self.anchor_B, self.head_VD, correction).tolist()


def build_rounds(
    shape: str, model: DraftModel, tables: Tables, batch_size: int, contexts: Sequence[int]
) -> Rounds:
    if SHAPES[shape]["context"] == "history":
        return HistoryRounds(model, tables.head_weight_VD, batch_size, contexts)
    return TapsRounds(model, batch_size, contexts)


# ---- heads -----------------------------------------------------------------------------------


@torch.no_grad()
def draft_full_logits(
    h_BKD: Tensor, anchor_B: Tensor, head_VD: Tensor, correction: MarkovHead | None
) -> Tensor:
    """Greedy tokens [B, K] by one pass over the whole LM head for all positions; DSpark then adds
    its low-rank correction over the vocabulary, position after position."""
    logits_BKV = h_BKD @ head_VD.T
    if correction is None:
        return logits_BKV.argmax(-1)
    prev_B, tokens = anchor_B, []
    for logits_BV in logits_BKV.unbind(1):
        bias_BV = correction.markov_w2(correction.markov_w1(prev_B))
        prev_B = (logits_BV + bias_BV).argmax(-1)
        tokens.append(prev_B)
    return torch.stack(tokens, dim=1)


@torch.no_grad()
def draft_low_rank(h_BKD: Tensor, anchor_B: Tensor, head: LowRankHead) -> Tensor:
    """Greedy tokens [B, K]; only R -> V projections, one per position."""
    state_BR, prev_B, tokens = head.initial(h_BKD), anchor_B, []
    for h_BD in h_BKD.unbind(1):
        features_BR, state_BR = head.step(state_BR, h_BD, prev_B, torch.nn.Identity())
        prev_B = (features_BR @ head.output_proj.weight.T).argmax(-1)
        tokens.append(prev_B)
    return torch.stack(tokens, dim=1)
