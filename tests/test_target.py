"""Targets of every family against plain Hugging Face forwards, and every refusal at the door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, save_tiny_llama
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dlite import target as target_module
from dlite.target import TargetModel

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not D / heads
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.3,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 5, "layer_types": MIXED, "attn_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("gemma3_text", {"sliding_window": 5, "layer_types": MIXED}),
}
SEQUENCES = [list(range(40, 54)), [99, 3, 3, 250, 7, 11, 300, 42, 17]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(our target, Hugging Face's model with eager attention), same weights, float64."""
    model_type, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim" or model_type != "qwen2"}
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return TargetModel.load(str(folder), dtype="float64"), plain.eval()


@torch.no_grad()
def reference(plain: Any, ids: list[int]) -> Any:
    return plain(torch.tensor([ids]), output_hidden_states=True, use_cache=False)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=1e-3, rtol=1e-4)


def test_ragged_forwards_with_rollback_equal_whole_sequences(family: Any) -> None:
    """Catches wrong masks, windows, positions, rows, and rejected keys that stay visible."""
    target, plain = family
    a, b = SEQUENCES
    wanted_a, wanted_b = (reference(plain, ids).logits[0] for ids in SEQUENCES)
    cache = target.new_cache(2, 8)  # too small: it must grow
    out = target.forward(target.pad([a[:8], b[:3]]), cache, counts_B=[8, 3])
    assert_close(target.logits(out.hidden_BTD[0]), wanted_a[:8])
    assert_close(target.logits(out.hidden_BTD[1, :3]), wanted_b[:3])
    cache.advance([8, 3])
    junk = [5, 6]
    tokens_BT = target.pad([[a[8], a[9], *junk], [b[3]]])
    out = target.forward(tokens_BT, cache, counts_B=[4, 1])
    assert_close(target.logits(out.hidden_BTD[0, :2]), wanted_a[8:10])
    assert_close(target.logits(out.hidden_BTD[1, :1]), wanted_b[3:4])
    cache.advance([2, 1])  # a's junk is rejected
    cache.select([1, 0])
    out = target.forward(target.pad([b[4:9], a[10:14]]), cache, counts_B=[5, 4])
    assert_close(target.logits(out.hidden_BTD[0]), wanted_b[4:])
    assert_close(target.logits(out.hidden_BTD[1, :4]), wanted_a[10:])
    cache.advance([3, 4])
    for step in range(7, 9):  # one row, one token at a time, as plain decoding does
        if step == 7:
            cache.select([0])
        out = target.forward(torch.tensor([[b[step]]]), cache)
        assert_close(target.logits(out.hidden_BTD[0]), wanted_b[step : step + 1])
        cache.advance([1])


def test_taps_of_first_middle_and_last_layer_equal_hidden_states(family: Any) -> None:
    """Catches layer ids off by one and a last layer read before the final norm."""
    target, plain = family
    layer_ids = [3, 0, 2]
    captured = target.capture(SEQUENCES, layer_ids)
    cache = target.new_cache(2, 16)
    lengths = [len(ids) for ids in SEQUENCES]
    live = target.forward(target.pad(SEQUENCES), cache, counts_B=lengths, tap_ids=layer_ids)
    for row, ids in enumerate(SEQUENCES):
        states = reference(plain, ids).hidden_states
        for position, layer_id in enumerate(layer_ids):
            assert_close(captured[row][:, position], states[layer_id + 1][0])
        assert_close(live.taps_BTLD[row, : len(ids)], captured[row])
    assert_close(live.taps_BTLD[:, :, 0], live.hidden_BTD)


@pytest.mark.parametrize("length", [5, 6])
def test_windows_hide_the_first_key_that_they_should(family: Any, length: int) -> None:
    """Catches a plain causal mask in use where a sequence just outgrows a window of 5."""
    target, plain = family
    ids = SEQUENCES[0][:length]
    (taps_SLD,) = target.capture([ids], [3])
    assert_close(taps_SLD[:, 0], reference(plain, ids).hidden_states[-1][0])


def test_embeddings_are_scaled_as_the_model_scales_them(family: Any) -> None:
    target, plain = family
    ids = torch.tensor(SEQUENCES[0])
    assert_close(target.embed(ids), reference(plain, SEQUENCES[0]).hidden_states[0][0])


def test_spare_rows_of_a_cache_take_new_requests(tiny_target: TargetModel) -> None:
    """Catches rows that land in another request's place, or take its leftovers."""
    ids = [SEQUENCES[0], SEQUENCES[1], SEQUENCES[0][::-1]]
    whole = tiny_target.capture(ids, [3])
    cache = tiny_target.new_cache(2, 4)
    lengths = [len(ids[0]) - 1, len(ids[1]) - 1]
    tiny_target.forward(tiny_target.pad([ids[0][:-1], ids[1][:-1]]), cache, counts_B=lengths)
    cache.advance(lengths)
    cache.select([1])
    for row in (2, 0):
        other = tiny_target.new_cache(1, len(ids[row]))
        tiny_target.forward(torch.tensor([ids[row][:-1]]), other)
        other.advance([len(ids[row]) - 1])
        cache.extend(other)
    last_BT = torch.tensor([[ids[row][-1]] for row in (1, 2, 0)])
    out = tiny_target.forward(last_BT, cache)
    for row, request in enumerate((1, 2, 0)):
        assert_close(out.hidden_BTD[row, 0], whole[request][-1, 0])


def test_capture_keeps_the_order_whatever_the_batches(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [list(range(3, 3 + n)) for n in (9, 2, 30, 1, 17)]
    together = tiny_target.capture(ids, [0, 3])
    monkeypatch.setattr(target_module, "CAPTURE_TOKENS", 20)
    for apart, whole in zip(tiny_target.capture(ids, [0, 3]), together, strict=True):
        assert_close(apart, whole)
    assert [len(taps) for taps in together] == [9, 2, 30, 1, 17]


def test_captured_states_can_be_trained_on(tiny_target: TargetModel) -> None:
    """Catches inference-mode tensors, which autograd refuses."""
    (taps_SLD,) = tiny_target.capture([[5, 6, 7]], [1])
    weight_D = torch.ones(tiny_target.hidden_size, requires_grad=True)
    (taps_SLD @ weight_D).sum().backward()
    assert weight_D.grad is not None


@pytest.mark.parametrize(
    ("weight", "value", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.nan, "layer 1 are NaN"),
        ("model.norm.weight", 0.0, "layer 3 are constant"),
    ],
)
def test_broken_states_are_refused_naming_the_layer(
    tmp_path: Path, weight: str, value: float, message: str
) -> None:
    target = TargetModel.load(str(save_tiny_llama(tmp_path)))
    target.model.get_parameter(weight).data.fill_(value)
    with pytest.raises(ValueError, match=message):
        target.capture([[5, 6, 7]], [0, 1, 3])


def test_a_prompt_beyond_the_targets_limit_is_refused_with_both_lengths(
    tiny_target: TargetModel,
) -> None:
    for call in (
        lambda ids: tiny_target.capture([ids], [0]),
        lambda ids: tiny_target.forward(torch.tensor([ids]), tiny_target.new_cache(1, 8)),
    ):
        with pytest.raises(ValueError, match=r"513 tokens exceeds the 512 .* shorten the prompt"):
            call([5] * 513)


def test_sharded_weights_with_a_tied_head_load(tmp_path: Path) -> None:
    whole = TargetModel.load(str(save_tiny_llama(tmp_path / "whole", tie_word_embeddings=True)))
    whole.model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    byte_tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shards = TargetModel.load(str(tmp_path / "shards"))
    assert shards.head_weight_VD is shards.embed_weight_VD
    assert shards.fingerprint() == whole.fingerprint()


def test_half_precision_gives_float32_logits(tiny_folder: Path) -> None:
    target = TargetModel.load(str(tiny_folder), dtype="bfloat16")
    out = target.forward(torch.tensor([[5, 6]]), target.new_cache(1, 2))
    assert out.hidden_BTD.dtype == torch.bfloat16
    assert target.logits(out.hidden_BTD).dtype == torch.float32


def test_end_ids_are_the_union_of_model_and_tokenizer(tmp_path: Path) -> None:
    """Catches a list of end tokens of which only one ends a request."""
    folder = save_tiny_llama(tmp_path, eos_token_id=[7, 9])
    assert TargetModel.load(str(folder)).eos_ids == {2, 7, 9}


def test_rendering_uses_the_template_and_its_kwargs(tiny_target: TargetModel) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n"
    decode = tiny_target.tokenizer.decode
    assert decode(tiny_target.render(messages, add_generation_prompt=False)) == text
    thinking = decode(tiny_target.render(messages, enable_thinking=True))
    assert thinking == f"{text}<|im_start|>assistant\n(thinking)\n"


def test_a_base_model_without_a_template_is_refused_by_name(tiny_folder: Path) -> None:
    target = TargetModel.load(str(tiny_folder))
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template .* use an instruction-tuned"):
        target.render([{"role": "user", "content": "hi"}])


def test_fingerprints_tell_weights_tokenizers_and_architectures_apart(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "a")
    first = TargetModel.load(str(folder))
    base = first.fingerprint()
    first.model.get_parameter("model.layers.2.mlp.up_proj.weight").data.mul_(1.1)
    assert _changed(first, base) == {"weights"}
    other = TargetModel.load(str(save_tiny_llama(tmp_path / "b", rope_theta=500.0)))
    assert _changed(other, base) == {"architecture"}
    byte_tokenizer(300).save_pretrained(folder)
    assert _changed(TargetModel.load(str(folder)), base) == {"tokenizer"}


def test_fingerprint_of_bfloat16_weights_does_not_depend_on_the_dtype_in_use(
    tmp_path: Path,
) -> None:
    half = TargetModel.load(str(save_tiny_llama(tmp_path)), dtype="bfloat16")
    half.model.save_pretrained(tmp_path)
    full = TargetModel.load(str(tmp_path), dtype="float32")
    assert full.fingerprint() == half.fingerprint()


def _changed(target: TargetModel, base: dict[str, str]) -> set[str]:
    return {key for key, value in target.fingerprint().items() if value != base[key]}


def test_smollm2_is_loaded_value_by_value_from_its_gguf(smollm2: TargetModel) -> None:
    """The hash was made without `fast_gguf`, so it shows that the patch changes no value."""
    assert smollm2.fingerprint()["weights"] == "8d4a2f85535a7f31"
    assert smollm2.eos_ids == {2}
    assert np.memmap.__module__ == "numpy", "the patch outlived the load"
