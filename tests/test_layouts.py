"""The DLite authors' layout, both ways. The reference here is written out, not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlite.checkpoint import export_authors, import_authors, load, read, save
from dlite.layouts import authors_config, read_config
from dlite.model.backbone import rotate
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks
from dlite.target import TargetModel
from dlite.weights import read_tensors, without_data

CONFIG: dict[str, Any] = {
    "architectures": ["DLiteDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "num_target_layers": 4,
    "max_position_embeddings": 512,
    "rope_theta": 5_000_000.0,
    "rope_parameters": {"rope_theta": 5_000_000.0, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "block_size": 6,
    "dlite_config": {
        "architecture_version": "dlite_v1",
        "model_role": "pivot_q_student",
        "chs_num_layers": 3,
        "target_layer_ids": [0, 2, 3],
        "sequential_head": "rnn",
        "sequential_rank": 10,
        "mask_token_id": 500,
        "anchor_group_size": 1,
    },
}
LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (4 * 24, 64),
    "self_attn.k_proj.weight": (2 * 24, 64),
    "self_attn.v_proj.weight": (2 * 24, 64),
    "self_attn.o_proj.weight": (64, 4 * 24),
    "self_attn.q_norm.weight": (24,),
    "self_attn.k_norm.weight": (24,),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}
SHAPES = {
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "norm.weight": (64,),
    "context_norm.weight": (64,),
    "layer_depth_embedding.weight": (4, 64),
    "sequential_head.prev_token_embedding.weight": (512, 10),
    "sequential_head.state_proj.weight": (20, 20),
    "sequential_head.state_hidden_mlp.weight": (10, 10 + 64),
    "sequential_head.output_proj.weight": (512, 10),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in SHAPES.items()}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != key}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return write(tmp_path / "theirs", CONFIG, random_tensors())


def test_import_then_export_gives_every_bit_and_every_key_back(
    theirs: Path, tmp_path: Path
) -> None:
    export_authors(import_authors(theirs), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(SHAPES)
        for name, tensor in random_tensors().items():
            got = file.get_tensor(name)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got.view(torch.int16), tensor.view(torch.int16)), name


def test_an_import_through_our_layout_and_back_keeps_every_bit(
    theirs: Path, tmp_path: Path
) -> None:
    save(import_authors(theirs), tmp_path / "ours", target=None, training={})
    assert read(tmp_path / "ours").layout == "dlite" and read(theirs).layout == "authors"
    export_authors(load(tmp_path / "ours"), tmp_path / "back")
    for name, tensor in read_tensors(tmp_path / "back").items():
        assert torch.equal(tensor, random_tensors()[name]), name


def test_an_import_means_what_the_config_says(theirs: Path) -> None:
    config = read(theirs).config
    assert config.num_draft_tokens == 5  # block_size counts the anchor
    assert config.tap_ids == (0, 2, 3) and config.rank == 10 and config.mask_token_id == 500
    assert config.qk_norm and config.head_dim == 24 and config.rope_theta == 5_000_000.0
    assert (config.context, config.composition, config.head) == ("taps", "sequence", "lowrank")


def test_an_import_drafts_with_its_target(tiny_target: TargetModel, theirs: Path) -> None:
    model = import_authors(theirs, tiny_target)
    tokens_AK, _ = model.draft(Blocks(torch.tensor([3, 4]), torch.randn(2, 3, 64)))
    assert tokens_AK.shape == (2, 5)


def test_keys_of_the_verifier_do_not_leak_into_the_draft_model(
    theirs: Path, tmp_path: Path
) -> None:
    extra = {"quantization_config": {"bits": 4}, "layer_types": ["full_attention"], "use_cache": 1}
    leaky = write(tmp_path / "leaky", {**CONFIG, **extra}, random_tensors())
    assert read(leaky).config == read(theirs).config
    export_authors(import_authors(leaky), tmp_path / "out")
    assert not extra.keys() & json.loads((tmp_path / "out/config.json").read_text()).keys()


@pytest.mark.parametrize(("model_type", "qk_norm"), [("qwen3", True), ("llama", False)])
def test_rope_of_an_export_is_the_same_in_transformers(model_type: str, qk_norm: bool) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = read_config({**CONFIG, "model_type": model_type})
    assert config.qk_norm is qk_norm
    exported = authors_config(config, "bfloat16")
    position_1S = torch.arange(6)[None]
    x_1NSH = torch.randn(1, 2, 6, 24)
    for key in ("rope_theta", "rope_parameters"):  # readers before and after transformers 5
        rest = without(exported, "dlite_config")
        old = AutoConfig.for_model(**without(rest, key))
        cos, sin = LlamaRotaryEmbedding(old)(x_1NSH, position_1S)  # pyright: ignore
        expected, _ = apply_rotary_pos_emb(x_1NSH, x_1NSH, cos, sin)
        torch.testing.assert_close(rotate(x_1NSH, position_1S, config.rope_theta), expected)


def test_shapes_at_the_size_of_qwen3_4b() -> None:
    config = read_config(
        {
            **CONFIG,
            **{"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5},
            **{"vocab_size": 151_936, "num_target_layers": 36},
            "dlite_config": {**CONFIG["dlite_config"], "sequential_rank": 320},
        }
    )
    shapes = {name: tuple(t.shape) for name, t in without_data(config).state_dict().items()}
    assert shapes["layers.4.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["layers.4.self_attn.o_proj.weight"] == (2560, 4096)
    assert shapes["layer_depth_embedding.weight"] == (36, 2560)
    assert shapes["sequential_head.prev_token_embedding.weight"] == (151_936, 320)
    assert shapes["sequential_head.state_proj.weight"] == (640, 640)
    assert shapes["sequential_head.state_hidden_mlp.weight"] == (320, 2880)
    assert shapes["sequential_head.output_proj.weight"] == (151_936, 320)


def test_a_teacher_is_imported_with_its_window(tmp_path: Path) -> None:
    theirs = {
        **CONFIG["dlite_config"],
        "model_role": "pivot_q_teacher",
        "swa_window_size": 32,
        "history_layer_ids": [0, 2, 3],
    }
    tensors = {**random_tensors(), "history_fuse.weight": torch.randn(64, 192).bfloat16()}
    tensors["history_norm.weight"] = torch.randn(64).bfloat16()
    teacher = write(tmp_path / "teacher", {**CONFIG, "dlite_config": theirs}, tensors)
    model = import_authors(teacher)
    assert model.config.context == "taps+history" and model.config.history_window == 32
    assert torch.equal(model.history_fuse.weight, tensors["history_fuse.weight"])
    theirs["history_layer_ids"] = [0, 1, 3]
    with pytest.raises(ValueError, match=r"history_layer_ids is \[0, 1, 3\]; only \[0, 2, 3\]"):
        read_config({**CONFIG, "dlite_config": theirs})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("anchor_group_size", 8, "anchor_group_size is 8; only 1 can be imported"),
        ("anchor_group_size", None, "lacks dlite_config.anchor_group_size"),
        ("target_layer_ids", None, "lacks dlite_config.target_layer_ids"),
        ("target_layer_ids", [0, 2, 4], r"tap_ids \[0, 2, 4\] must be distinct layers of 0 .. 3"),
        ("chs_num_layers", 12, "chs_num_layers is 12; only 3 can be imported"),
        ("model_role", "pivot_kv", "model_role is 'pivot_kv'; only 'pivot_q_student' and teachers"),
        ("sequential_head", "gru", "sequential_head is 'gru'; only 'rnn'"),
        ("architecture_version", "dlite_v2", "architecture_version is 'dlite_v2'"),
        ("mask_token_id", None, "lacks dlite_config.mask_token_id"),
    ],
)
def test_a_variant_of_theirs_that_is_not_ours_is_refused(
    key: str, value: Any, message: str
) -> None:
    inner = {**CONFIG["dlite_config"], key: value}
    if value is None:
        inner = without(inner, key)
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, "dlite_config": inner})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(CONFIG, "head_dim"), "lacks head_dim"),
        (without(CONFIG, "num_target_layers"), "lacks num_target_layers"),
        (without(without(CONFIG, "rope_theta"), "rope_parameters"), "must state one rope_theta"),
        ({**CONFIG, "rope_theta": 1e4}, r"one rope_theta, found \[10000.0, 5000000.0\]"),
        ({**CONFIG, "rope_scaling": None, "rope_parameters": {"rope_type": "yarn"}}, "is 'yarn'"),
        ({**CONFIG, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        (
            {
                **without(CONFIG, "block_size"),
                "dlite_config": {**CONFIG["dlite_config"], "block_size": 8},
            },
            "lacks block_size",
        ),
    ],
)
def test_nothing_is_guessed_or_read_from_the_wrong_level(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.q_proj.bias",
        "sequential_head.state_proj.bias",
        "sequential_head.output_proj.bias",
    ],
)
def test_biases_are_refused_by_name_and_not_dropped(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "biased", CONFIG, {**random_tensors(), name: torch.ones(20)})
    with pytest.raises(ValueError, match=f"unexpected {name} .biases are not supported"):
        import_authors(folder)


def test_head_norms_that_a_qwen3_draft_model_lacks_are_named(tmp_path: Path) -> None:
    name = "layers.1.self_attn.k_norm.weight"
    folder = write(tmp_path / "bare", CONFIG, without(random_tensors(), name))
    with pytest.raises(ValueError, match=f"missing {name}"):
        import_authors(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "tied"}, "only head='lowrank', and this draft model has 'tied'"),
        ({"composition": "feature"}, "only composition='sequence'"),
        ({"context": "taps+history"}, "only context='taps'"),
        ({"first_predictor": "anchor"}, "only first_predictor='placeholder'"),
        ({"draft_vocab_size": 100}, "only pruned=False"),
        ({"attention_bias": True}, "only attention_bias=False"),
        ({"mask_token_id": None}, "no learned placeholder vector"),
    ],
)
def test_an_export_that_would_lose_something_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = DraftConfig.from_dict({**read_config(CONFIG).to_dict(), **changes})
    with pytest.raises(ValueError, match=message):
        export_authors(DraftModel(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_our_layout_is_not_taken_for_theirs(theirs: Path, tmp_path: Path) -> None:
    save(import_authors(theirs), tmp_path / "ours", target=None, training={})
    with pytest.raises(ValueError, match="is in the 'dlite' layout, not in the authors'"):
        import_authors(tmp_path / "ours")
