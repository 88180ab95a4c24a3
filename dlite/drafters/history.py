"""DFlash and DSpark as drafters: keys and values of every earlier position in every draft layer.

The state is written once for each position, in place, and a round never copies it: grouped queries
share one pass over it. It grows with the context; that is what DLite does without.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dlite.attention import attention
from dlite.drafters.base import Drafter
from dlite.drafters.neural import NeuralDrafter, Uniforms, drafts_from
from dlite.kv_cache import KVCache
from dlite.model.backbone import Attention, Layer
from dlite.model.drafter import DraftModel
from dlite.types import Draft, Request, SessionKey, Verdict, View


def drafter_of(model: DraftModel) -> Drafter:
    """The drafter for a model's context. Raises ValueError for a teacher's."""
    return HistoryDrafter(model) if model.config.context == "history" else NeuralDrafter(model)


class HistoryDrafter:
    """Drafts with a DraftModel of context 'history' that is bound to its target.

    Sampled like `NeuralDrafter`. A window of W positions is masked, not forgotten: the state keeps
    the others too. Raises ValueError for another context.
    """

    def __init__(self, model: DraftModel, name: str = "history") -> None:
        if model.config.context != "history":
            raise ValueError(
                f"a draft model with context {model.config.context!r} has no history of its own "
                "taps; draft with NeuralDrafter, or with a context='history' model"
            )
        self.name, self.model = name, model.eval()
        self.tap_ids = model.config.tap_ids
        self._uniforms = Uniforms()
        self._attentions = [cast(Layer, layer).self_attn for layer in model.layers]
        self._ids: list[str] = []  # of the requests, one for each row of the cache
        self._cache = self._new_cache(0, 0)

    def _new_cache(self, num_rows: int, capacity: int) -> KVCache:
        config, weight = self.model.config, self.model.norm.weight
        shape = (num_rows, config.num_key_value_heads, capacity, config.head_dim)
        keys, values = ([weight.new_zeros(shape) for _ in self._attentions] for _ in range(2))
        return KVCache(keys, values)

    def start(self, request: Request) -> None:
        self._uniforms.start(request)

    @torch.no_grad()
    def read(self, requests: list[Request], taps_BTLD: Tensor, counts: list[int]) -> None:
        """See `ReadsHistory`."""
        row = {request.id: b for b, request in enumerate(requests)}
        if row.keys().isdisjoint(self._ids):
            cache = self._new_cache(len(requests), taps_BTLD.shape[1])
            self._write(cache, taps_BTLD, counts)
            self._cache.extend(cache)
            self._ids += row
        else:
            order = [row[name] for name in self._ids]
            self._write(self._cache, taps_BTLD[order], [counts[b] for b in order])

    def _write(self, cache: KVCache, taps_BTLD: Tensor, counts: list[int]) -> None:
        weight = self.model.norm.weight
        num_rows, num_new = taps_BTLD.shape[:2]
        taps_SLD = taps_BTLD.flatten(0, 1).to(weight.device, weight.dtype)
        vectors_BTD = self.model.history_vectors(taps_SLD).unflatten(0, (num_rows, num_new))
        start_B = torch.tensor(cache.lengths_B, device=weight.device)
        position_BT = start_B[:, None] + torch.arange(num_new, device=weight.device)
        cache.place(num_new)
        for number, layer in enumerate(self._attentions):
            cache.update(*layer.keys_values(vectors_BTD, position_BT), number)
        cache.advance(counts)

    @torch.no_grad()
    def propose(self, views: list[View]) -> list[Draft]:
        drafts = [Draft(source=self.name) for _ in views]
        wanted = [i for i, view in enumerate(views) if view.max_draft > 0]
        if not wanted:
            return drafts
        row = {name: b for b, name in enumerate(self._ids)}
        anchors = [0] * len(self._ids)
        for i in wanted:
            b = row[views[i].request.id]
            assert self._cache.lengths_B[b] == len(views[i].tokens) - 1
            anchors[b] = views[i].tokens[-1]
        rows = [row[views[i].request.id] for i in wanted]
        h_AKD = self._hidden(torch.tensor(anchors, device=self.model.norm.weight.device))[rows]
        made = drafts_from(self.model, h_AKD, [views[i] for i in wanted], self._uniforms, self.name)
        for i, draft in zip(wanted, made, strict=True):
            drafts[i] = draft
        return drafts

    def _hidden(self, anchor_B: Tensor) -> Tensor:
        """Every row's block behind that row's history; what it writes there is overwritten."""
        config, cache = self.model.config, self._cache
        num_block = config.num_draft_tokens + (config.first_predictor == "placeholder")
        length_B = torch.tensor(cache.lengths_B, device=anchor_B.device)
        key_S = torch.arange(max(cache.lengths_B) + num_block, device=anchor_B.device)
        hidden_BS = key_S >= length_B[:, None] + num_block
        if config.history_window:
            outside_BS = key_S < length_B[:, None] - config.history_window
            hidden_BS |= outside_BS & (key_S >= config.history_sinks)
        mask_BS = self.model.norm.weight.new_zeros(hidden_BS.shape).masked_fill_(
            hidden_BS, -torch.inf
        )
        mask_B1QS = mask_BS[:, None, None].expand(-1, 1, num_block, -1)
        cache.place(num_block)
        layer = self._attentions[0]

        def nothing_to_copy(current: Attention) -> tuple[Tensor, Tensor]:
            nonlocal layer
            layer = current
            empty = anchor_B.new_zeros(
                (len(anchor_B), config.num_key_value_heads, 0, config.head_dim),
                dtype=mask_BS.dtype,
            )
            return empty, empty

        def attend(q: Tensor, k_own: Tensor, v_own: Tensor, _: Tensor | None) -> Tensor:
            keys, values = cache.update(k_own, v_own, self._attentions.index(layer))
            return attention(layer, q, keys, values, mask_B1QS)[0].transpose(1, 2)

        return self.model.attend(anchor_B, length_B, nothing_to_copy, form=attend)

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        pass

    def finish(self, request: Request) -> None:
        self._uniforms.finish(request)
        if request.id not in self._ids:  # interrupted before its prefill was read
            return
        order, hole = list(range(len(self._ids) - 1)), self._ids.index(request.id)
        if hole < len(order):
            order[hole] = len(order)
        self._cache.select(order)
        self._ids = [self._ids[row] for row in order]

    def abort(self, request: Request) -> None:
        self.finish(request)

    def close(self, session: SessionKey) -> None:
        pass
