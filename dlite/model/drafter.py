"""One draft model, four axes: DLite, its ablations, its history-aware teacher and baselines.

The target's embedding table and LM head are borrowed through `bind`: neither parameters of this
module nor stored in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlite.model.backbone import Attention, ContextKeysValues, Layer, RMSNorm, flex, sdpa
from dlite.model.config import DraftConfig
from dlite.model.heads import HEADS
from dlite.model.masks import Blocks, window_rows
from dlite.sampling import draw, warp
from dlite.types import Sampling

if TYPE_CHECKING:
    from dlite.target import TargetModel


class DraftModel(nn.Module):
    """See DraftConfig for the axes. `bind` it to its target before any forward."""

    d2t: Tensor
    t2d: Tensor
    checkpointing = False  # keep only the layers' inputs for backward, and compute the rest again

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = self.config = config
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.context != "history":  # whose layouts have none: each tap has its own columns of fc
            self.layer_depth_embedding = nn.Embedding(c.num_target_layers, c.hidden_size)
        self.context_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.sequential_head = HEADS[c.head](c)
        if c.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))
        if c.composition == "feature" or c.context == "history":
            width = len(c.tap_ids) * c.hidden_size
            self.feature_fuse = nn.Linear(width, c.hidden_size, bias=False)
        if c.context == "taps+history":
            self.history_fuse = nn.Linear(3 * c.hidden_size, c.hidden_size, bias=False)
            self.history_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.pruned:
            self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        self._init_weights()

    def _init_weights(self) -> None:
        """Linear layers normal(0, 0.02) as in the targets' families. Depth embeddings and the head
        keep PyTorch's larger start: with 0 or 0.02 their gradients are too small to be heard
        beside the others (LOG.md, 2026-11-30)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("sequential_head"):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.mask_token_id is None:
            # Not zero: a zero query is blind to position, and all placeholders would be one.
            nn.init.normal_(self.mask_embedding, std=0.1)

    def bind(self, target: TargetModel) -> DraftModel:
        """Borrow the target's embedding table and LM head (frozen, never stored)."""
        self._embed = target.embed
        head_VD = target.head_weight_VD.detach()  # a Parameter would become one of ours
        self._head_VD = head_VD[self.draft_ids()] if self.config.pruned else head_VD
        self._num_token_ids = target.num_token_ids
        return self

    def draft_ids(self) -> Tensor:
        """Target ids [Dv] that drafts can hold, ascending."""
        if not self.config.pruned:
            return torch.arange(self.config.vocab_size, device=self.norm.weight.device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocabulary(self, d2t: Tensor, t2d: Tensor) -> None:
        """Install the maps of a pruned vocabulary (dlite.model.vocab.vocab_maps)."""
        assert self.config.pruned
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def vocab_weight(self) -> Tensor:
        """The matrix [Dv, F] that turns this head's features into logits."""
        return self.sequential_head.vocab_weight(self._head_VD)

    # ---- context: what a block attends to besides itself -------------------------------------

    def slots(self, taps_ALD: Tensor) -> Tensor:
        """Context vectors of the taps at a-1: one per layer, or one in all (`feature`)."""
        states_ALD = taps_ALD.to(self.norm.weight.dtype)
        if self.config.context != "history":
            states_ALD = states_ALD + self.layer_depth_embedding.weight[list(self.config.tap_ids)]
        if self.config.composition == "feature" or self.config.context == "history":
            states_ALD = self.feature_fuse(states_ALD.flatten(-2)).unsqueeze(-2)
        return self.context_norm(states_ALD)

    def history_vectors(self, states_SCD: Tensor) -> Tensor:
        """One context vector [S, D] per position of the history."""
        if self.config.context == "history":
            return self.slots(states_SCD).squeeze(-2)
        fused_SD = self.history_fuse(states_SCD.flatten(-2).to(self.history_fuse.weight.dtype))
        return self.history_norm(fused_SD)

    @property
    def _gap(self) -> int:
        return 1 if self.config.context == "history" else 2

    def _dense_context(self, blocks: Blocks) -> tuple[ContextKeysValues, Tensor, Tensor | None]:
        """Per-anchor keys and values, the anchors' positions, and the mask [A, 1, 1, C] of the
        context (None: everything is seen)."""
        history, config = blocks.history, self.config
        position_A = blocks.anchor_A.new_zeros(len(blocks.anchor_A))
        if history is None:
            slots_ALD = self.slots(blocks.taps_ALD)
            position_AL = position_A[:, None].expand(slots_ALD.shape[:2])
            return lambda layer: layer.keys_values(slots_ALD, position_AL), position_A, None

        position_A = history.row_A
        row_AC, seen_AC = window_rows(
            history, config.history_window, self._gap, config.history_sinks
        )
        vectors_SD = self.history_vectors(history.states_SCD)
        row_S = torch.arange(len(vectors_SD), device=vectors_SD.device)
        slots_ALD = None if config.context == "history" else self.slots(blocks.taps_ALD)

        def keys_values(layer: Attention) -> tuple[Tensor, Tensor]:
            parts = [
                tuple(
                    x_NSH.transpose(0, 1)[row_AC].transpose(1, 2)
                    for x_NSH in layer.keys_values(vectors_SD, row_S)
                )
            ]
            if slots_ALD is not None:
                position_AL = position_A[:, None].expand(slots_ALD.shape[:2])
                parts.append(layer.keys_values(slots_ALD, position_AL))
            keys, values = zip(*parts, strict=True)
            return torch.cat(keys, dim=2), torch.cat(values, dim=2)

        if slots_ALD is not None:
            seen_AC = torch.cat([seen_AC, seen_AC.new_ones(slots_ALD.shape[:2])], dim=1)
        return keys_values, position_A, seen_AC[:, None, None]

    # ---- backbone ----------------------------------------------------------------------------

    def _block(self, anchor_A: Tensor) -> Tensor:
        """The residual stream at the start: [E(x_a), m, ..., m]."""
        c = self.config
        anchor_AD = self._embed(anchor_A).to(self.norm.weight.dtype)
        mask_D = (
            self.mask_embedding
            if c.mask_token_id is None
            else self._embed(anchor_A.new_tensor([c.mask_token_id]))[0].to(anchor_AD.dtype)
        )
        num_masks = c.num_draft_tokens - (c.first_predictor == "anchor")
        mask_AKD = mask_D.expand(len(anchor_A), num_masks, -1)
        return torch.cat([anchor_AD[:, None], mask_AKD], dim=1)

    def hidden(self, blocks: Blocks, form: str = "dense") -> Tensor:
        """States h_AKD that predict x_{a+1} .. x_{a+K}; after the final norm where the head reads
        them so. `form`: "dense" (per anchor, SDPA) or "flex" (packed, needs `history`)."""
        if form == "flex":
            return self._head_input(self._flex_layers(blocks))
        context, position_A, mask_A11C = self._dense_context(blocks)
        return self.attend(blocks.anchor_A, position_A, context, mask_A11C)

    def attend(
        self,
        anchor_A: Tensor,
        position_A: Tensor,
        context: ContextKeysValues,
        mask_A11C: Tensor | None = None,
        form: Callable[..., Tensor] = sdpa,
    ) -> Tensor:
        """`hidden` over context keys and values from anywhere, such as a draft-side KV cache."""
        x_AQD = self._block(anchor_A)
        num_block = x_AQD.shape[1]
        mask = None
        if mask_A11C is not None:
            own = mask_A11C.new_ones(len(anchor_A), 1, 1, num_block)
            mask = torch.cat([mask_A11C, own], dim=-1).expand(-1, -1, num_block, -1)
        position_AQ = position_A[:, None] + torch.arange(num_block, device=x_AQD.device)
        for layer in self.layers:
            x_AQD = self._run(layer, x_AQD, position_AQ, context, mask, form)
        return self._head_input(x_AQD)

    def _run(self, layer: nn.Module, *arguments: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)

    def _head_input(self, x_AQD: Tensor) -> Tensor:
        h_AKD = x_AQD[:, -self.config.num_draft_tokens :]
        return self.norm(h_AKD) if self.sequential_head.norm_first else h_AKD

    def _flex_layers(self, blocks: Blocks) -> Tensor:
        history, config = blocks.history, self.config
        assert history is not None, "the flex form packs history contexts"
        x_AQD = self._block(blocks.anchor_A)
        num_block = x_AQD.shape[1]
        vectors_SD = self.history_vectors(history.states_SCD)
        row_S = torch.arange(len(vectors_SD), device=x_AQD.device)
        extra, positions = [vectors_SD], [row_S]
        slots_ALD = None if config.context == "history" else self.slots(blocks.taps_ALD)
        num_slots = 0 if slots_ALD is None else slots_ALD.shape[1]
        if slots_ALD is not None:
            extra.append(slots_ALD.flatten(0, 1))
            positions.append(history.row_A.repeat_interleave(num_slots))
        context_1CD, position_1C = torch.cat(extra)[None], torch.cat(positions)[None]
        attend = flex(history, num_block, num_slots, config, self._gap)
        position_AQ = history.row_A[:, None] + torch.arange(num_block, device=x_AQD.device)
        x_1ND, position_1N = x_AQD.flatten(0, 1)[None], position_AQ.flatten()[None]
        for layer in self.layers:
            x_1ND = self._run(
                layer,
                x_1ND,
                position_1N,
                lambda a: a.keys_values(context_1CD, position_1C),
                None,
                attend,
            )
        return x_1ND[0].unflatten(0, x_AQD.shape[:2])

    def forward(self, blocks: Blocks, prev_AK: Tensor, form: str = "dense") -> Tensor:
        """Teacher-forced features [A, K, F]: previous tokens are the true ones, anchor first."""
        return self.sequential_head.unroll(self.hidden(blocks, form), prev_AK, self.norm)

    # ---- drafting ----------------------------------------------------------------------------

    @torch.no_grad()
    def draft(
        self,
        blocks: Blocks,
        num_draft: int | None = None,
        samplings: list[Sampling] | None = None,
        uniforms: Tensor | None = None,
        confidence_AK: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """`decide` on the states of these blocks."""
        h_AKD = self.hidden(blocks)
        return self.decide(h_AKD, blocks.anchor_A, num_draft, samplings, uniforms, confidence_AK)

    @torch.no_grad()
    def decide(
        self,
        h_AKD: Tensor,
        anchor_A: Tensor,
        num_draft: int | None = None,
        samplings: list[Sampling] | None = None,
        uniforms: Tensor | None = None,
        confidence_AK: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Draft left to right: tokens [A, K] in target ids and, for rows that are sampled, the
        distributions [K, V] that they were drawn from (None: argmax).

        `uniforms` [A, K] in [0, 1) drive the sampled rows. `confidence_AK` is filled with the
        model's largest probability at temperature 1. Raises ValueError for more than the trained K.
        """
        num_draft = self.config.num_draft_tokens if num_draft is None else num_draft
        if not 0 < num_draft <= self.config.num_draft_tokens:
            raise ValueError(
                f"{num_draft} draft tokens asked of a draft model trained for "
                f"{self.config.num_draft_tokens}; ask for 1 to {self.config.num_draft_tokens}"
            )
        weight_VF = self.vocab_weight()
        state, prev_A = self.sequential_head.initial(h_AKD), anchor_A
        sampled = [i for i, s in enumerate(samplings or []) if not s.greedy]
        probs: dict[int, list[Tensor]] = {i: [] for i in sampled}
        tokens = []
        for k in range(num_draft):
            features_AF, state = self.sequential_head.step(state, h_AKD[:, k], prev_A, self.norm)
            logits_AV = features_AF.to(weight_VF.dtype) @ weight_VF.T
            if not self.config.pruned:  # a pruned vocabulary holds none of the LM head's padding
                logits_AV[:, self._num_token_ids :] = -torch.inf
            prev_A = logits_AV.argmax(-1)
            if confidence_AK is not None:
                best_A = logits_AV.gather(-1, prev_A[:, None])[:, 0].float()
                confidence_AK[:, k] = (best_A - logits_AV.float().logsumexp(-1)).exp()
            for i in sampled:
                assert samplings is not None and uniforms is not None
                probs[i].append(warp(logits_AV[i : i + 1], samplings[i])[0])
                prev_A[i] = draw(probs[i][-1], float(uniforms[i, k]))
            if self.config.pruned:
                prev_A = prev_A + self.d2t[prev_A]
            tokens.append(prev_A)
        rows = [torch.stack(probs[i]) if i in probs else None for i in range(len(h_AKD))]
        return torch.stack(tokens, dim=1), [None if q is None else self.scatter(q) for q in rows]

    def scatter(self, probs_KV: Tensor) -> Tensor:
        """Distributions over draft ids as distributions over target ids, 0 outside."""
        if not self.config.pruned:
            return probs_KV
        full_KV = probs_KV.new_zeros(len(probs_KV), self.config.vocab_size)
        full_KV[:, self.draft_ids()] = probs_KV
        return full_KV
