"""Checkpoint layouts of drafters with a history, as other projects publish them.

    z-lab        DFlash: `dflash_config` beside the keys of a Qwen3 config
    deepspec     DSpark, DFlash: flat keys; holds copies of the target's embeddings and LM head
    speculators  dspark, dflash: `speculators_model_type`, a nested `transformer_layer_config`

The tensors are a student's (`dlite.layouts`) without depth embeddings, under other names: `fc`,
`hidden_norm`, `markov_head`. Two counts differ between the layouts:

    layer ids    id k is the output of 0-based layer k, as in ours; in speculators it is the input
                 of layer k, our k-1. Nobody but us reads the last layer after the final norm.
    block_size   the anchor and its placeholders. The anchor's own place predicts nothing, except
                 in DeepSpec's DSpark and where `sample_from_anchor` says so.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from dlite.layout_keys import SHARED_KEYS, need, rope_theta
from dlite.model.config import DraftConfig

LAYOUTS = ("z-lab", "deepspec", "speculators")
# Keys that change what a draft model computes, with the values (besides null) that don't.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "causal": (False,),
    "final_logit_softcapping": (0,),
    "input_embedding_scale": (1,),
    "is_causal": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "projector_type": (),
}
READ = {
    *SHARED_KEYS,
    *NEUTRAL,
    *("aux_hidden_state_layer_ids", "block_size", "dflash_config", "draft_vocab_size"),
    *("enable_confidence_head", "layer_types", "markov_head_type", "markov_rank", "mask_token_id"),
    *("model_type", "rope_parameters", "rope_scaling", "rope_theta", "sample_from_anchor"),
    *("sliding_window", "speculators_config", "speculators_model_type", "target_hidden_size"),
    *("target_layer_ids", "transformer_layer_config", "use_sliding_window"),
}
OF_NO_EFFECT = {
    *("_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map"),
    *("bos_token_id", "confidence_head_with_markov", "dtype", "eos_token_id", "initializer_range"),
    *("mask_token", "max_window_layers", "num_anchors", "pad_token_id", "pretraining_tp"),
    # The target's, where its config was copied: a quantized draft has tensors that are refused.
    "quantization_config",
    *("sliding_window_non_causal", "speculators_version", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache"),
}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a layout says in its own words; `layer_ids` are in its own counting, too."""

    model: dict[str, Any]  # where it has the keys of a Hugging Face config
    ids_key: str
    layer_ids: list[int]
    block_size: int
    mask_token_id: int
    from_anchor: bool
    rank: int  # 0: no Markov head
    draft_vocab_size: int


def layout_of(raw: dict[str, Any]) -> str | None:
    """One of LAYOUTS, or None for another model's config."""
    if raw.get("speculators_model_type") in ("dflash", "dspark"):
        return "speculators"
    if "dflash_config" in raw:
        return "z-lab"
    if "target_layer_ids" in raw and _class_of(raw) is not None:
        return "deepspec"
    return None


def _class_of(raw: dict[str, Any]) -> str | None:
    """ "dspark" or "dflash", by the name of DeepSpec's class."""
    name = "".join(raw.get("architectures") or []).lower()
    return next((kind for kind in ("dspark", "dflash") if kind in name), None)


def read_config(raw: dict[str, Any], layout: str, num_target_layers: int | None) -> DraftConfig:
    """Raises ValueError, naming the key, for what our models don't compute; warns of what is left
    out. `num_target_layers` is read where the layout does not state it."""
    stated = {"z-lab": _z_lab, "deepspec": _deepspec, "speculators": _speculators}[layout](raw)
    model = stated.model
    unknown = sorted((raw.keys() | model.keys()) - READ - OF_NO_EFFECT)
    if unknown:
        warnings.warn(
            f"config.json has {', '.join(unknown)}, which dlite does not know and leaves out; if "
            "they change what the draft model computes, fewer drafts are accepted",
            stacklevel=2,
        )
    for where in (raw, model):
        _refuse(where)
    if (kind := need(model, "model_type")) != "qwen3":
        raise ValueError(f"model_type is {kind!r}; only DFlash's 'qwen3' layers can be imported")
    _need_full_attention(model, need(model, "num_hidden_layers"))
    num_layers = _num_target_layers(raw, num_target_layers)
    sizes = {k: need(model, k) for k in SHARED_KEYS if k != "num_target_layers"}
    if not 0 <= stated.mask_token_id < sizes["vocab_size"]:
        raise ValueError(
            f"mask_token_id is {stated.mask_token_id}; the target embeds 0 .. "
            f"{sizes['vocab_size'] - 1}: give the id that the checkpoint was trained with"
        )
    if raw.get("target_hidden_size") not in (None, sizes["hidden_size"]):
        raise ValueError(
            f"target_hidden_size is {raw['target_hidden_size']}; only the draft model's own "
            f"{sizes['hidden_size']} can be imported"
        )
    pruned = stated.draft_vocab_size != sizes["vocab_size"]
    return DraftConfig(
        tap_ids=_tap_ids(stated, num_layers, shift=layout == "speculators"),
        num_target_layers=num_layers,
        num_draft_tokens=stated.block_size - (not stated.from_anchor),
        context="history",
        composition="feature",
        head="markov" if stated.rank else "none",
        first_predictor="anchor" if stated.from_anchor else "placeholder",
        history_window=0,
        rank=stated.rank,
        draft_vocab_size=stated.draft_vocab_size if pruned else 0,
        mask_token_id=stated.mask_token_id,
        rope_theta=rope_theta(model),
        qk_norm=True,
        **sizes,
    )


def _z_lab(raw: dict[str, Any]) -> _Stated:
    inner = raw["dflash_config"]
    known = {"target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers"}
    unknown = sorted(inner.keys() - known - {"sample_from_anchor"} - NEUTRAL.keys())
    if unknown:
        raise ValueError(
            f"dflash_config.{unknown[0]} is {inner[unknown[0]]!r}; dlite has no such part, so "
            "this checkpoint cannot be imported"
        )
    _refuse(inner, "dflash_config.")
    return _Stated(
        model=raw,
        ids_key="dflash_config.target_layer_ids",
        layer_ids=need(_one_of(raw, inner, "target_layer_ids"), "target_layer_ids"),
        block_size=need(_one_of(raw, inner, "block_size"), "block_size"),
        mask_token_id=need(_one_of(raw, inner, "mask_token_id"), "mask_token_id"),
        from_anchor=_one_of(raw, inner, "sample_from_anchor").get("sample_from_anchor", False),
        rank=0,
        draft_vocab_size=need(raw, "vocab_size"),
    )


def _one_of(raw: dict[str, Any], inner: dict[str, Any], key: str) -> dict[str, Any]:
    """The level that has `key`: z-lab's older configs have block_size outside, newer inside."""
    if key in raw and key in inner and raw[key] != inner[key]:
        raise ValueError(
            f"config.json states {key} twice, as {raw[key]} and in dflash_config as {inner[key]}; "
            "restore the one that the checkpoint was trained with"
        )
    return inner if key in inner else raw


def _deepspec(raw: dict[str, Any]) -> _Stated:
    dspark = _class_of(raw) == "dspark"
    return _Stated(
        model=raw,
        ids_key="target_layer_ids",
        layer_ids=raw["target_layer_ids"],
        block_size=need(raw, "block_size"),
        mask_token_id=need(raw, "mask_token_id"),
        from_anchor=raw.get("sample_from_anchor", dspark),
        rank=_rank(raw) if dspark else 0,
        draft_vocab_size=raw.get("draft_vocab_size") or need(raw, "vocab_size"),
    )


def _speculators(raw: dict[str, Any]) -> _Stated:
    dspark = raw["speculators_model_type"] == "dspark"
    # Readers disagree on what a missing key means for dspark: speculators true, vLLM false.
    from_anchor = need(raw, "sample_from_anchor") if dspark else raw.get("sample_from_anchor")
    num_draft = need(raw, "block_size") - (not from_anchor)
    served = need(raw, "speculators_config")["proposal_methods"][0]["speculative_tokens"]
    if served != num_draft:
        warnings.warn(
            f"speculative_tokens is {served} and left out: dlite drafts as many tokens as the "
            f"block holds, {num_draft}, unless told otherwise (--num-draft {served})",
            stacklevel=2,
        )
    return _Stated(
        model=need(raw, "transformer_layer_config"),
        ids_key="aux_hidden_state_layer_ids",
        layer_ids=need(raw, "aux_hidden_state_layer_ids"),
        block_size=raw["block_size"],
        mask_token_id=need(raw, "mask_token_id"),
        from_anchor=bool(from_anchor),
        rank=_rank(raw) if dspark else 0,
        draft_vocab_size=need(raw, "draft_vocab_size"),
    )


def _rank(raw: dict[str, Any]) -> int:
    rank = need(raw, "markov_rank")
    if rank and (kind := need(raw, "markov_head_type")) != "vanilla":
        raise ValueError(f"markov_head_type is {kind!r}; only 'vanilla' can be imported")
    return rank


def _refuse(values: dict[str, Any], where: str = "") -> None:
    for key, neutral in NEUTRAL.items():
        value = values.get(key)
        if value is not None and value not in neutral:
            only = f"only {neutral[0]!r} can" if neutral else "a checkpoint with it cannot"
            raise ValueError(f"{where}{key} is {value!r}; {only} be imported")


def _need_full_attention(model: dict[str, Any], num_layers: int) -> None:
    """A target's own list may be longer: the draft's layer i has the kind at i."""
    kinds = model.get("layer_types") or [SLIDING if model.get("use_sliding_window") else FULL]
    other = [kind for kind in kinds[:num_layers] if kind != FULL]
    if other:
        raise ValueError(
            f"layer_types has {other[0]!r} (sliding_window {model.get('sliding_window')}); only "
            f"{FULL!r} can be imported"
        )


def _num_target_layers(raw: dict[str, Any], given: int | None) -> int:
    inner = raw.get("dflash_config", {})
    number = _one_of(raw, inner, "num_target_layers").get("num_target_layers", given)
    if number is None:
        raise ValueError(
            "config.json lacks num_target_layers, and nothing is guessed: import it with its "
            "target (dlite export DIR OUT --to dlite --target TARGET)"
        )
    return number


def _tap_ids(stated: _Stated, num_layers: int, *, shift: bool) -> tuple[int, ...]:
    tap_ids = tuple(k - shift for k in stated.layer_ids)
    if -1 in tap_ids:
        raise ValueError(
            f"{stated.ids_key} {stated.layer_ids} has 0, the target's embeddings; dlite reads "
            "outputs of layers only, so this checkpoint cannot be imported"
        )
    if num_layers - 1 in tap_ids:
        raise ValueError(
            f"{stated.ids_key} {stated.layer_ids} has {num_layers - 1 + shift}, the last layer "
            "before the target's final norm; dlite reads it after that norm, so this checkpoint "
            "cannot be imported"
        )
    return tap_ids
