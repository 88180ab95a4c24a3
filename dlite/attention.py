"""The attention that targets run with: SDPA that never copies keys for grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "dlite"  # with "sdpa" in it, transformers would refuse it for models that softcap


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Query [B, N, T, H], key and value [B, Nkv, S, H], additive mask [B, 1, T, S] or None.

    None means causal when T == S and everything visible when T == 1. With a mask, the queries
    that share a key head are laid side by side along T, so that keys and values are read in place.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    num_groups = num_heads // key.shape[1]
    if attention_mask is None and num_queries > 1:
        if softcap is None:
            out = F.scaled_dot_product_attention(
                query, key, value, scale=scaling, is_causal=True, enable_gqa=num_groups > 1
            )
            return out.transpose(1, 2), None
        hidden_TS = torch.full((num_queries, num_queries), -torch.inf, device=query.device)
        attention_mask = hidden_TS.triu(1).to(query.dtype)[None, None]
    packed = query.reshape(num_rows, key.shape[1], num_groups * num_queries, head_dim)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, num_groups, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scale = head_dim**-0.5 if scaling is None else scaling
        scores = softcap * torch.tanh(packed @ key.transpose(2, 3) * scale / softcap)
        scores = scores if attention_mask is None else scores + attention_mask
        out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2), None


AttentionInterface.register(NAME, attention)
