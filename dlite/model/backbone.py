"""The parallel backbone: transformer layers whose context enters as keys and values only.

A block is the anchor and its placeholders; every query sees its own context and its whole block,
in both directions, and blocks never see each other (DLite section 4.1.1). So anchors are a batch
dimension, and a mask is needed only where history windows run over the start of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dlite.model.config import DraftConfig
from dlite.model.masks import History, sees_history

ContextKeysValues = Callable[["Attention"], tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotate(x_ANSH: Tensor, position_AS: Tensor, theta: float) -> Tensor:
    """RoPE in the Hugging Face half-split layout; angles in float64, so any position is exact."""
    half = x_ANSH.shape[-1] // 2
    exponent_H = torch.arange(half, device=x_ANSH.device, dtype=torch.float64) / half
    angle_AS_H = position_AS[..., None].double() * theta**-exponent_H
    cos, sin = (f(angle_AS_H).to(x_ANSH.dtype).unsqueeze(-3) for f in (torch.cos, torch.sin))
    left, right = x_ANSH[..., :half], x_ANSH[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = self.config = config
        width, kv_width = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
        self.q_proj = nn.Linear(c.hidden_size, width, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_width, bias=c.attention_bias)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _split(self, x_ASW: Tensor) -> Tensor:
        return x_ASW.unflatten(-1, (-1, self.config.head_dim)).transpose(-2, -3)

    def queries(self, x_AQD: Tensor, position_AQ: Tensor) -> Tensor:
        q_ANQH = self._split(self.q_proj(x_AQD))
        if self.config.qk_norm:
            q_ANQH = self.q_norm(q_ANQH)
        return rotate(q_ANQH, position_AQ, self.config.rope_theta)

    def keys_values(self, x_ASD: Tensor, position_AS: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [A, kv heads, S, H] of context vectors or block states."""
        k_ANSH = self._split(self.k_proj(x_ASD))
        if self.config.qk_norm:
            k_ANSH = self.k_norm(k_ANSH)
        return rotate(k_ANSH, position_AS, self.config.rope_theta), self._split(self.v_proj(x_ASD))

    def forward(
        self,
        x_AQD: Tensor,
        position_AQ: Tensor,
        context: ContextKeysValues,
        mask_A1QS: Tensor | None,
        form: Callable[..., Tensor],
    ) -> Tensor:
        k_ctx, v_ctx = context(self)
        k_own, v_own = self.keys_values(x_AQD, position_AQ)
        out_ANQH = form(
            self.queries(x_AQD, position_AQ),
            torch.cat([k_ctx, k_own], dim=2),
            torch.cat([v_ctx, v_own], dim=2),
            mask_A1QS,
        )
        return self.o_proj(out_ANQH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_AQD: Tensor, *attention_arguments) -> Tensor:
        x_AQD = x_AQD + self.self_attn(self.input_layernorm(x_AQD), *attention_arguments)
        return x_AQD + self.mlp(self.post_attention_layernorm(x_AQD))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@cache
def _flex_attention(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled, it holds all scores at once, as the dense form does.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def flex(
    history: History, block: int, slots: int, config: DraftConfig, gap: int
) -> Callable[..., Tensor]:
    """The packed form: queries [1, A*block] on keys [history S; A*slots; A*block], one block mask.

    The same predicate as the dense form. Forward only on CPU (PyTorch has no CPU backward).
    """
    from torch.nn.attention.flex_attention import create_block_mask

    window, sinks = config.history_window, config.history_sinks
    num_history, num_anchors = len(history.states_SCD), len(history.row_A)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        anchor = q // block
        seen = sees_history(history.row_A[anchor], history.start_A[anchor], k, window, gap, sinks)
        own_slot = (k - num_history) // max(slots, 1) == anchor
        own_block = (k - num_history - num_anchors * slots) // block == anchor
        in_slots = (k >= num_history) & (k < num_history + num_anchors * slots)
        in_block = k >= num_history + num_anchors * slots
        return torch.where(in_block, own_block, torch.where(in_slots, own_slot, seen))

    mask = create_block_mask(
        visible,
        B=None,
        H=None,
        Q_LEN=num_anchors * block,
        KV_LEN=num_history + num_anchors * (slots + block),
        device=str(history.row_A.device),
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        out = _flex_attention(q.device.type)(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return attend
