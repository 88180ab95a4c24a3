"""Short hashes that tell another architecture, other weights or another tokenizer."""

from __future__ import annotations

import hashlib
from typing import Any

SAMPLES_PER_TENSOR = 64
ARCHITECTURE_KEYS = (  # of the config: what changes the function computed
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rope_parameters", "sliding_window", "layer_types"),
)
TEXT = 'Ünïcode, emoji 🙂\n\tdef f(x):  return x ** 2  # 12345\r\n{"key": [1, 2.5e-3]}'


def fingerprint(model: Any, tokenizer: Any) -> dict[str, str]:
    """Hashes under "architecture", "weights" and "tokenizer".

    Weights: names, shapes and sampled values rounded to bfloat16, so that a bfloat16 checkpoint
    has the same one whether it is loaded in bfloat16 or in float32.
    """
    weights = hashlib.sha256()
    for name, tensor in model.named_parameters():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR]
        weights.update(f"{name}{tuple(tensor.shape)}".encode())
        weights.update(sample.bfloat16().float().cpu().numpy().tobytes())
    return {
        "architecture": architecture_fingerprint(model.config),
        "weights": weights.hexdigest()[:16],
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }


def architecture_fingerprint(config: Any) -> str:
    values = config.to_dict()
    return _short({key: values.get(key) for key in ARCHITECTURE_KEYS})


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of its vocabulary, its special ids and the ids of a fixed text (one vocabulary can be split
    in two ways)."""
    parts = (
        sorted(tokenizer.get_vocab().items()),
        tokenizer(TEXT, add_special_tokens=False)["input_ids"],
        sorted(tokenizer.all_special_ids),
        tokenizer.eos_token_id,
    )
    return _short(parts)


def _short(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
