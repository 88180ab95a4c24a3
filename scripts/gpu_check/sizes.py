"""What is measured: true sizes, and small ones that run anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dlite import attention
from dlite.target import TargetModel
from eval.shapes import PRESETS, Sizes

# Few layers, but the real vocabulary: the placeholder of the family must be in it.
SIZES = {**PRESETS, "tiny": Sizes(4, 4, 64, 128, 4, 2, 16, 151936, qk_norm=True)}


@dataclass(frozen=True, slots=True)
class Plan:
    targets: tuple[str, ...]  # of SIZES
    draft_layers: int
    sample_tokens: int
    anchors: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    verify_tokens: tuple[int, ...]
    verify_context: int


FULL = Plan(
    ("qwen3-4b", "qwen3-8b"),
    5,
    4096,
    512,
    (1, 8, 64),
    (1024, 4096, 16384, 65536),
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    1024,
)
TINY = Plan(("tiny",), 2, 128, 32, (1, 2), (32, 64), (1, 8), 32)


def random_target(name: str, device: str) -> TargetModel:
    """A Qwen3 of a preset's sizes with random bfloat16 weights, built on the device itself."""
    sizes = SIZES[name]
    config = Qwen3Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_target_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=name == "qwen3-4b",
        eos_token_id=1,
        pad_token_id=0,
    )
    config._attn_implementation = attention.NAME
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    _fill(model, sizes)
    vocabulary = {f"t{i}": i for i in range(4)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")),
        eos_token="t1",
        pad_token="t0",
    )
    return TargetModel(model.eval().requires_grad_(False), tokenizer, f"random {name}")


@torch.no_grad()
def _fill(model: Qwen3ForCausalLM, sizes: Sizes) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    rotary = model.model.rotary_emb
    half = torch.arange(0, sizes.head_dim, 2, device=rotary.inv_freq.device).float()
    theta = model.config.rope_parameters["rope_theta"]
    rotary.inv_freq = theta ** (-half / sizes.head_dim)  # its buffer was made without data
    rotary.original_inv_freq = rotary.inv_freq
