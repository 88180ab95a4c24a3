"""Writing the layouts of `history_layouts`. What they have no words for is refused by name."""

from __future__ import annotations

from typing import Any

from dlite.history_layouts import FULL
from dlite.layout_keys import SHARED_KEYS
from dlite.model.config import DraftConfig


def write_config(
    config: DraftConfig, layout: str, dtype: str, verifier: tuple[str, list[str]] | None
) -> dict[str, Any]:
    """`config.json` in a layout. Raises ValueError for what it has no words for.

    `verifier`: the target's name and the classes that its own config names (speculators only).
    """
    kind = "dspark" if config.head == "markov" else "dflash"
    _check_expressible(config, layout, kind)
    from_anchor = config.first_predictor == "anchor"
    block_size = config.num_draft_tokens + (not from_anchor)
    model = {
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in SHARED_KEYS if key != "num_target_layers"},
        "layer_types": [FULL] * config.num_hidden_layers,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    markov = {
        "markov_rank": config.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    ids = list(config.tap_ids)
    if layout == "z-lab":
        return {
            "architectures": ["DFlashDraftModel"],
            **model,
            **dtypes,
            "block_size": block_size,
            "num_target_layers": config.num_target_layers,
            "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": ids},
        }
    if layout == "deepspec":
        return {
            "architectures": ["Qwen3DSparkModel"],
            **model,
            **dtypes,
            "block_size": block_size,
            "num_target_layers": config.num_target_layers,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": ids,
            **markov,
        }
    assert verifier is not None
    name, classes = verifier
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": classes},
        },
        "transformer_layer_config": model,
        "draft_vocab_size": config.num_draft_ids,
        "aux_hidden_state_layer_ids": [k + 1 for k in ids],
        "block_size": block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": from_anchor,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **({**markov, "confidence_head_with_markov": False} if kind == "dspark" else {}),
    }


def _check_expressible(config: DraftConfig, layout: str, kind: str) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "context": ("history",),
        "history_window": (0,),
        "head": {"z-lab": ("none",), "deepspec": ("markov",)}.get(layout, ("markov", "none")),
        "qk_norm": (True,),
        "attention_bias": (False,),
        "pruned": (False, True) if layout == "speculators" else (False,),
        "first_predictor": ("anchor",)
        if layout == "deepspec"
        else ("placeholder",)
        if kind == "dflash"
        else ("anchor", "placeholder"),
    }
    for name, values in wanted.items():
        if (own := getattr(config, name)) not in values:
            raise ValueError(
                f"the {layout} layout holds only {name}={' or '.join(map(repr, values))}, and this "
                f"draft model has {own!r}; keep it in dlite's own layout (--to dlite)"
            )
    if config.mask_token_id is None:
        raise ValueError(
            f"the {layout} layout has no learned placeholder vector; train with a mask_token_id, "
            "or keep dlite's own layout (--to dlite)"
        )
    if (last := config.num_target_layers - 1) in config.tap_ids:
        raise ValueError(
            f"the {layout} layout reads layer {last}, the target's last, before the final norm, "
            "and this draft model after it; keep it in dlite's own layout (--to dlite)"
        )
