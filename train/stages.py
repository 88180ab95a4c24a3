"""What a stage trains: its model, the model that it learns from, and one step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dlite.model.config import DraftConfig, default_tap_ids
from dlite.model.drafter import DraftModel
from dlite.model.losses import LogProbs, target_log_probs, vocab_loss, wide
from dlite.model.masks import Blocks
from dlite.model.vocab import vocab_maps
from dlite.target import TargetModel
from train.batches import Batch
from train.config import ModelConfig, StageConfig
from train.counts import check_mask_id, token_counts
from train.data import Sample

LABEL_ROWS = 512  # rows of full-vocabulary logits alive at once where labels are the argmax


def draft_config(target: TargetModel, model: ModelConfig, samples: Sequence[Sample]) -> DraftConfig:
    """The student's configuration: sizes from the target, the rest from the run's `model` group."""
    hf = target.model.config
    mask_id = target.family.mask_token_id if model.mask_token_id is None else model.mask_token_id
    if mask_id is not None:
        check_mask_id(mask_id, samples, target)
    size = model.draft_vocab_size
    if size < 0:
        size = int((token_counts(samples, target.vocab_size) > 0).sum()) + len(target.eos_ids)
    rope = getattr(hf, "rope_parameters", None) or {}
    return DraftConfig(
        tap_ids=tuple(model.tap_ids) or default_tap_ids(target.num_layers, model.num_taps),
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=target.vocab_size,
        num_hidden_layers=model.num_hidden_layers,
        num_draft_tokens=model.num_draft_tokens,
        composition=model.composition,  # type: ignore[arg-type]
        head=model.head,  # type: ignore[arg-type]
        first_predictor=model.first_predictor,  # type: ignore[arg-type]
        history_window=model.history_window,
        history_sinks=model.history_sinks,
        rank=model.rank,
        draft_vocab_size=min(size, target.vocab_size),
        mask_token_id=mask_id,
        hidden_act=getattr(hf, "hidden_act", None) or hf.hidden_activation,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope.get("rope_theta", 10_000.0),
        qk_norm=target.family.qk_norm,
        attention_bias=False,
        max_position_embeddings=target.max_length,
    )


def build_model(
    config: DraftConfig, target: TargetModel, counts_V: Tensor, head_init: str, seed: int
) -> DraftModel:
    """A fresh model bound to its target; its weights are a function of `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config)
    if config.pruned:
        real = len(target.tokenizer)
        maps = vocab_maps(
            counts_V, config.draft_vocab_size, always=target.eos_ids, num_real_ids=real
        )
        model.set_vocabulary(*maps)
    model.to(target.device)
    model.bind(target)
    if head_init == "svd":
        if config.head != "lowrank":
            raise ValueError(f"head_init=svd needs head=lowrank, not {config.head!r}")
        model.sequential_head.init_from_svd(model._head_VD)  # type: ignore[operator]
    return model


def compile_mlps(model: DraftModel, backend: str = "inductor") -> None:
    """One compiled graph for every number of anchors. Attention is left to its own kernels."""
    for layer in model.layers:
        layer.mlp.compile(dynamic=True, backend=backend)  # type: ignore[union-attr,operator]


class Stage(nn.Module):
    """One stage's trainee and the frozen models around it. `forward` gives the loss of a batch, so
    that data-parallel wrappers see every use of every parameter."""

    def __init__(
        self,
        config: StageConfig,
        model: DraftModel,
        target: TargetModel,
        teacher: DraftModel | None,
        gamma: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.config, self.gamma, self.loss = config, gamma, config.loss.weights()
        # In tuples: neither frozen model is a part of this module, its state or its device moves.
        self._frozen = target, teacher
        self.form = "dense"  # of attention where there is a history
        model.requires_grad_(True)
        if config.freeze_head:
            model.sequential_head.requires_grad_(False)

    @property
    def teacher(self) -> DraftModel | None:
        return self._frozen[1]

    @property
    def with_history(self) -> bool:
        return any(m is not None and m.config.context != "taps" for m in (self.model, self.teacher))

    def forward(self, batch: Batch, totals: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        target, teacher = self._frozen
        features_AKF = _features(self.model, batch, self.form)
        wants_target = bool(self.loss.tv or self.loss.tau)
        return vocab_loss(
            features_AKF,
            self.model.vocab_weight(),
            batch.labels,
            self.loss,
            totals,
            self.gamma,
            target=self._target(batch, target) if wants_target else None,
            teacher=_log_probs(teacher, batch, self.form) if teacher is not None else None,
        )

    def _target(self, batch: Batch, target: TargetModel) -> LogProbs:
        ids = self.model.draft_ids() if self.model.config.pruned else None
        return target_log_probs(batch.labels, target.logits, ids, self.model._head_VD)


def _blocks(model: DraftModel, batch: Batch) -> Blocks:
    if model.config.context == "taps":
        return batch.blocks
    return replace(batch.blocks, history=batch.history)


def _features(model: DraftModel, batch: Batch, form: str) -> Tensor:
    packs = model.config.context != "taps"
    return model(_blocks(model, batch), batch.prev_AK, form if packs else "dense")


def _log_probs(teacher: DraftModel, batch: Batch, form: str) -> LogProbs:
    with torch.no_grad():
        features_NF = _features(teacher, batch, form).flatten(0, 1)
        weight_VF = teacher.vocab_weight()

    @torch.no_grad()
    def log_probs(rows: slice) -> Tensor:
        return wide(features_NF[rows].to(weight_VF.dtype) @ weight_VF.T).log_softmax(-1)

    return log_probs


@torch.no_grad()
def relabel(batch: Batch, target: TargetModel, t2draft_V: Tensor) -> None:
    """Labels = the target's argmax at each row; previous tokens stay the recorded ones."""
    states_ND = batch.labels.state_AKD.flatten(0, 1)
    best = [target.logits(rows).argmax(-1) for rows in states_ND.split(LABEL_ROWS)]
    batch.labels.label_AK = torch.cat(best).view_as(batch.labels.label_AK)
    batch.labels.draft_label_AK = t2draft_V.to(states_ND.device)[batch.labels.label_AK]


def t2draft(model: DraftModel) -> Tensor:
    """Draft id of every target id [V], -1 outside the draft vocabulary."""
    ids = model.draft_ids().cpu()
    table_V = torch.full((model.config.vocab_size,), -1, dtype=torch.long)
    table_V[ids] = torch.arange(len(ids))
    return table_V
