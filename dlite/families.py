"""What differs between the model families that can be targets. One entry per model_type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Where a causal LM keeps its parts (dotted paths) and how its decoder is built.

    `masks` says what the decoder takes as a prepared attention mask: one causal mask ("full"),
    one that `config.sliding_window` narrows for all layers ("window"), or a dict by layer type.
    Scaled embeddings need no entry: the embedding module itself scales.
    """

    masks: Literal["full", "window", "by_layer"] = "full"
    qk_norm: bool = False
    attention_bias: bool = False  # of q, k and v, whatever the config says
    softcaps_logits: bool = False  # by config.final_logit_softcapping
    mask_token_id: int | None = None  # an id with an embedding that no text uses
    decoder: str = "model"
    layers: str = "model.layers"
    final_norm: str = "model.norm"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(masks="window"),
    "qwen2": Family(masks="by_layer", attention_bias=True),
    "qwen3": Family(masks="by_layer", qk_norm=True, mask_token_id=151669),
    "gemma": Family(),
    "gemma2": Family(masks="by_layer", softcaps_logits=True),
    "gemma3_text": Family(masks="by_layer", qk_norm=True, softcaps_logits=True),
}


def family_of(model_type: str, name: str) -> Family:
    """Raises ValueError for a model_type that has no entry; `name` is the model's, for the text."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"{name} is of model_type {model_type!r}, which dlite doesn't know; "
            f"use a text-only model of one of {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
