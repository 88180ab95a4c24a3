"""Checkpoints of other projects, written out: their configs, their tensors, what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dlite.target import TargetModel

D, HEADS, KV_HEADS, H, INNER, V, R, K = 64, 4, 2, 24, 96, 512, 10, 6
THETA, EPS, MASK = 50_000.0, 1e-6, 500
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": H,
    "vocab_size": V,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": 512,
    "layer_types": ["full_attention", "full_attention"],
    "rope_theta": THETA,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DTYPES = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
MARKOV = {"markov_rank": R, "markov_head_type": "vanilla", "enable_confidence_head": False}
Z_LAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    **MODEL,
    **DTYPES,
    "block_size": K + 1,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 0]},
}
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    **MODEL,
    **DTYPES,
    "block_size": K,
    "num_target_layers": 4,
    "mask_token_id": MASK,
    "target_layer_ids": [2, 0],
    **MARKOV,
}


def speculators(kind: str, block_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": K,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "TARGET", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": MODEL,
        "draft_vocab_size": V,
        "aux_hidden_state_layer_ids": [3, 1],  # inputs of layers: the same taps as [2, 0] above
        "block_size": block_size,
        "mask_token_id": MASK,
        "sample_from_anchor": kind == "dspark",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **({**MARKOV, "confidence_head_with_markov": False} if kind == "dspark" else {}),
        **changes,
    }


PRUNED = 100
CONFIGS = {
    "z-lab": Z_LAB,
    "deepspec": DEEPSPEC,
    "speculators-dflash": speculators("dflash", K + 1),
    "speculators-dspark": speculators("dspark", K),
    "speculators-pruned": speculators("dspark", K, draft_vocab_size=PRUNED),
    "speculators-late": speculators("dspark", K + 1, sample_from_anchor=False),
}


def tensors_of(config: dict[str, Any], target: TargetModel) -> dict[str, Tensor]:
    """A checkpoint's tensors under its own names, as its layout stores them."""
    generator = torch.Generator().manual_seed(0)
    num_ids = config.get("draft_vocab_size", V)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 2 * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(2):
        layer = f"layers.{i}."
        shapes |= {f"{layer}{n}.weight": (D,) for n in ("input_layernorm",)}
        shapes |= {f"{layer}{n}.weight": (D,) for n in ("post_attention_layernorm",)}
        shapes |= {f"{layer}self_attn.{n}_norm.weight": (H,) for n in "qk"}
        shapes |= {f"{layer}self_attn.q_proj.weight": (HEADS * H, D)}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (KV_HEADS * H, D) for n in "kv"}
        shapes |= {f"{layer}self_attn.o_proj.weight": (D, HEADS * H)}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (INNER, D) for n in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (D, INNER)}
    if "markov_rank" in config:
        shapes["markov_head.markov_w1.weight"] = (V, R)
        shapes["markov_head.markov_w2.weight"] = (num_ids, R)
    tensors = {
        name: (0.3 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }
    head_VD = target.head_weight_VD.detach().bfloat16()
    if num_ids < V:
        tensors["t2d"] = torch.arange(V) % 5 == 2
        tensors["t2d"][PRUNED * 5 :] = False
        kept = tensors["t2d"].nonzero().squeeze(-1)
        tensors["d2t"] = kept - torch.arange(PRUNED)
        tensors["lm_head.weight"] = head_VD[kept]
    if config.get("architectures") == ["Qwen3DSparkModel"]:
        tensors["embed_tokens.weight"] = target.embed_weight_VD.detach().bfloat16()
        tensors["lm_head.weight"] = head_VD.clone()
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rope(x_SNH: Tensor, position_S: Tensor) -> Tensor:
    angle_SH = position_S[:, None] * THETA ** (-torch.arange(0, H, 2) / H)
    cos, sin = (torch.cat([f(angle_SH)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    left, right = x_SNH.chunk(2, -1)
    return x_SNH * cos + torch.cat([-right, left], -1) * sin


def reference(w: dict[str, Tensor], states_SLD: Tensor, block_QD: Tensor, num_draft: int) -> Tensor:
    """DFlash's forward for one block behind S positions: context keys and values from
    hidden_norm(fc(taps)), absolute positions, the block seen in both directions."""
    context_SD = norm(states_SLD.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    num_context, x_QD = len(context_SD), block_QD
    position_S = torch.arange(num_context + len(block_QD)).float()
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        y_QD = norm(x_QD, w[f"layers.{i}.input_layernorm.weight"])
        both_SD = torch.cat([context_SD, y_QD])
        q = (y_QD @ w[attention + "q_proj.weight"].T).unflatten(-1, (HEADS, H))
        k = (both_SD @ w[attention + "k_proj.weight"].T).unflatten(-1, (KV_HEADS, H))
        v = (both_SD @ w[attention + "v_proj.weight"].T).unflatten(-1, (KV_HEADS, H))
        q = rope(norm(q, w[attention + "q_norm.weight"]), position_S[num_context:])
        k = rope(norm(k, w[attention + "k_norm.weight"]), position_S)
        group = HEADS // KV_HEADS
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores_NQS = torch.einsum("qnh,snh->nqs", q, k) / H**0.5
        out_QNH = torch.einsum("nqs,snh->qnh", scores_NQS.softmax(-1), v)
        x_QD = x_QD + out_QNH.flatten(1) @ w[attention + "o_proj.weight"].T
        y_QD = norm(x_QD, w[f"layers.{i}.post_attention_layernorm.weight"])
        gated = F.silu(y_QD @ w[mlp + "gate_proj.weight"].T) * (y_QD @ w[mlp + "up_proj.weight"].T)
        x_QD = x_QD + gated @ w[mlp + "down_proj.weight"].T
    return norm(x_QD, w["norm.weight"])[-num_draft:]
