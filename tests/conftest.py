"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import requests
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dlite.decode import DecodeResult, decode
from dlite.target import TargetModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}(thinking)\n{% endif %}{% endif %}"
)
TINY_DRAFT: dict[str, Any] = {  # a DraftConfig that fits the tiny target
    "tap_ids": (0, 1, 3),
    "num_target_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [
        "The quick brown fox jumps over the lazy dog and the other dogs jump over the fox.",
        "def add(first, second):\n    return first + second\n",
        "system user assistant What is the answer? The answer is forty-two, he said.",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny_llama(folder: Path, **changes: object) -> Path:
    """Writes a random 4-layer Llama of vocabulary 512 with its tokenizer; `changes`: its config."""
    sizes: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)  # pyright: ignore
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_target"))


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> TargetModel:
    return TargetModel.load(str(tiny_folder))


@pytest.fixture(scope="session")
def plain_result(tiny_target: TargetModel) -> DecodeResult:
    """Seven short requests decoded one by one without drafts."""
    return decode(tiny_target, requests(), None, batch_size=1)


@pytest.fixture(scope="session")
def answers(plain_result: DecodeResult) -> dict[str, list[int]]:
    return {done.request.id: done.tokens for done in plain_result.completions}


@pytest.fixture(scope="session")
def smollm2() -> TargetModel:
    """The real SmolLM2-135M-Instruct in float32; loading takes 10 to 30 seconds."""
    return TargetModel.load("smollm2-135m")
