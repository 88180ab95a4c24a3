"""What every layout of a draft model's `config.json` says in the same words."""

from __future__ import annotations

from typing import Any

# Keys that a DraftConfig and a Hugging Face config share by name and meaning.
SHARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "num_target_layers",
    "max_position_embeddings",
)


def need(raw: dict[str, Any], key: str, where: str = "") -> Any:
    if key not in raw:
        raise ValueError(
            f"config.json lacks {where}{key}; nothing is guessed: add the value that the "
            "checkpoint was trained with"
        )
    return raw[key]


def rope_theta(raw: dict[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or raw.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"the draft model's rope is {kind!r} with partial_rotary_factor "
            f"{raw.get('partial_rotary_factor', 1)}; only plain, full rope can be imported"
        )
    thetas = {float(c["rope_theta"]) for c in (raw, parameters) if "rope_theta" in c}
    if len(thetas) != 1:
        raise ValueError(f"config.json must state one rope_theta, found {sorted(thetas)}")
    return thetas.pop()
