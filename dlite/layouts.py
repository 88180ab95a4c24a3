"""Checkpoint layouts: how `config.json` states a DraftConfig, in ours and in the DLite authors'.

Both hold the same tensors under the same names; only the config differs. The authors' layout is
known by its key `dlite_config`, ours by `draft`. (`history_layouts` has those of other projects.)
The tensors of a student (linear weights are [out, in]; n target layers, N query and G key heads of
size H, I the width of the MLP):

    layers.{i}.input_layernorm.weight, layers.{i}.post_attention_layernorm.weight       [D]
    layers.{i}.self_attn.q_proj.weight [N*H, D], k_proj, v_proj [G*H, D], o_proj       [D, N*H]
    layers.{i}.self_attn.q_norm.weight, k_norm, where model_type is qwen3             [H]
    layers.{i}.mlp.gate_proj.weight, up_proj [I, D], down_proj                          [D, I]
    norm.weight, context_norm.weight                                                    [D]
    layer_depth_embedding.weight, rows indexed by layer id                              [n, D]
    sequential_head.prev_token_embedding.weight                                         [V, R]
    sequential_head.state_proj.weight, from [s; E_r(x)] to [gate; cand]                 [2R, 2R]
    sequential_head.state_hidden_mlp.weight, from [s; h]                                [R, R+D]
    sequential_head.output_proj.weight                                                  [V, R]

A teacher adds history_fuse.weight [D, 3D] and history_norm.weight [D].
"""

from __future__ import annotations

from typing import Any

import dlite
from dlite import history_layouts
from dlite.layout_keys import SHARED_KEYS, need, rope_theta
from dlite.model.config import DraftConfig

ARCHITECTURE = "DLiteDraftModel"
SCHEMA_VERSION = 1
TAP_RULE = (
    "id k is the output of 0-based decoder layer k of the target; "
    "the last layer is read after the target's final norm"
)
AUTHORS_VERSION = "dlite_v1"
AUTHORS_STUDENT = "pivot_q_student"
# The only point on DraftConfig's axes that the authors' student layout has.
AUTHORS_ONLY = {
    "context": "taps",
    "composition": "sequence",
    "head": "lowrank",
    "first_predictor": "placeholder",
    "pruned": False,
    "attention_bias": False,
}


def layout_of(raw: dict[str, Any]) -> str:
    """ "dlite", "authors" or one of `history_layouts`. Raises ValueError for another config."""
    for key, layout in (("draft", "dlite"), ("dlite_config", "authors")):
        if key in raw:
            return layout
    if (layout := history_layouts.layout_of(raw)) is not None:
        return layout
    kind = raw.get("speculators_model_type") or raw.get("model_type") or "unknown"
    raise ValueError(
        f"config.json describes a {kind!r} model and has neither 'draft' nor 'dlite_config'; "
        "give a folder written by dlite, the DLite authors' release, or a DFlash or DSpark draft "
        "model of z-lab, DeepSpec or speculators"
    )


def read_config(raw: dict[str, Any], num_target_layers: int | None = None) -> DraftConfig:
    """The DraftConfig that a `config.json` of any layout states. Raises ValueError.

    `num_target_layers` is read where the layout has no such key.
    """
    layout = layout_of(raw)
    if layout == "dlite":
        return _from_ours(raw)
    if layout == "authors":
        return _from_authors(raw)
    return history_layouts.read_config(raw, layout, num_target_layers)


def our_config(config: DraftConfig) -> dict[str, Any]:
    """The model's part of `config.json`. What servers look for is repeated beside `draft`."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "dlite",
        "schema_version": SCHEMA_VERSION,
        "dlite_version": dlite.__version__,
        "draft": config.to_dict(),
        "taps": {"layer_ids": list(config.tap_ids), "rule": TAP_RULE, "last_layer_post_norm": True},
        **_repeated(config),
    }


def _repeated(config: DraftConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        # Readers before transformers 5 know only the first of these two.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }


def _from_ours(raw: dict[str, Any]) -> DraftConfig:
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"config.json has schema_version {version!r}; dlite {dlite.__version__} reads "
            f"{SCHEMA_VERSION}: install the dlite that wrote it ({raw.get('dlite_version')})"
        )
    config = DraftConfig.from_dict(raw["draft"])
    taps = raw.get("taps", {})
    stated = {"tap ids": taps.get("layer_ids"), **{k: raw.get(k) for k in _repeated(config)}}
    expected = {"tap ids": list(config.tap_ids), **_repeated(config)}
    for key, value in expected.items():
        if stated[key] not in (None, value):
            raise ValueError(
                f"config.json states {key} twice, as {stated[key]} and in 'draft' as {value}; "
                "restore the one that the model was trained with"
            )
    if not taps.get("last_layer_post_norm", True):
        raise ValueError(
            "config.json says that the last tap is read before the target's final norm; "
            "dlite reads it after: train the draft model with dlite"
        )
    return config


def _need_equal(raw: dict[str, Any], key: str, expected: Any) -> None:
    value = need(raw, key, "dlite_config.")
    if value != expected:
        raise ValueError(f"dlite_config.{key} is {value!r}; only {expected!r} can be imported")


def _from_authors(raw: dict[str, Any]) -> DraftConfig:
    theirs = raw["dlite_config"]
    _need_equal(theirs, "architecture_version", AUTHORS_VERSION)
    _need_equal(theirs, "sequential_head", "rnn")
    _need_equal(theirs, "anchor_group_size", 1)
    tap_ids = need(theirs, "target_layer_ids", "dlite_config.")
    _need_equal(theirs, "chs_num_layers", len(tap_ids))
    role = str(need(theirs, "model_role", "dlite_config."))
    config = DraftConfig(
        tap_ids=tuple(tap_ids),
        num_draft_tokens=need(raw, "block_size") - 1,
        rank=need(theirs, "sequential_rank", "dlite_config."),
        mask_token_id=need(theirs, "mask_token_id", "dlite_config."),
        rope_theta=rope_theta(raw),
        qk_norm=need(raw, "model_type") == "qwen3",
        **{key: need(raw, key) for key in SHARED_KEYS},
        **_teacher_fields(theirs, role),
    )
    middle = config.history_layer_ids
    if config.context == "taps+history" and theirs.get("history_layer_ids", middle) != list(middle):
        raise ValueError(
            f"dlite_config.history_layer_ids is {theirs.get('history_layer_ids')}; only "
            f"{list(middle)} (first, middle, last) can be imported"
        )
    return config


def _teacher_fields(theirs: dict[str, Any], role: str) -> dict[str, Any]:
    if role == AUTHORS_STUDENT:
        return {}
    if "teacher" in role:
        window = need(theirs, "swa_window_size", "dlite_config.")
        return {"context": "taps+history", "history_window": window}
    raise ValueError(
        f"dlite_config.model_role is {role!r}; only {AUTHORS_STUDENT!r} and teachers can be "
        "imported"
    )


def authors_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """`config.json` in the authors' layout. Raises ValueError for what it has no words for."""
    for name, value in AUTHORS_ONLY.items():
        if (own := getattr(config, name)) != value:
            raise ValueError(
                f"the authors' layout holds only {name}={value!r}, and this draft model has "
                f"{own!r}; keep it in dlite's own layout (--to dlite)"
            )
    if config.mask_token_id is None:
        raise ValueError(
            "the authors' layout has no learned placeholder vector; train with a mask_token_id, "
            "or keep dlite's own layout (--to dlite)"
        )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{key: getattr(config, key) for key in SHARED_KEYS},
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "block_size": config.num_draft_tokens + 1,
        "dlite_config": {
            "architecture_version": AUTHORS_VERSION,
            "model_role": AUTHORS_STUDENT,
            "chs_num_layers": len(config.tap_ids),
            "target_layer_ids": list(config.tap_ids),
            "sequential_head": "rnn",
            "sequential_rank": config.rank,
            "mask_token_id": config.mask_token_id,
            "anchor_group_size": 1,
        },
    }
