"""The target: a frozen causal LM that prefills, verifies, rolls back and shows hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlite.families import family_of
from dlite.fingerprint import fingerprint
from dlite.kv_cache import KVCache
from dlite.loading import load_model, load_outline
from dlite.taps import check_taps, tapped

CAPTURE_TOKENS = 4096  # padded tokens per forward of `capture`; bounds its memory, changes no value


@dataclass(frozen=True, slots=True)
class Forward:
    """`hidden_BTD` are taken after the final norm; `taps_BTLD` in the order asked for."""

    hidden_BTD: Tensor
    taps_BTLD: Tensor | None


class TargetModel:
    """A causal LM of a known family with its tokenizer. Frozen: no gradient reaches it."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        config = model.config
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.family = family_of(config.model_type, name)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_length: int = config.max_position_embeddings
        self.embed_weight_VD: Tensor = model.get_input_embeddings().weight
        self.head_weight_VD: Tensor = model.get_output_embeddings().weight
        self.vocab_size: int = self.head_weight_VD.shape[0]
        self.num_token_ids: int = min(len(tokenizer), self.vocab_size)  # the rest pads the LM head
        self._softcap = config.final_logit_softcapping if self.family.softcaps_logits else None
        self._decoder = model.get_submodule(self.family.decoder)
        # Older transformers call it past_key_values, and ignore a `cache` without a word.
        known = signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        window = getattr(config, "sliding_window", None) if self.family.masks != "full" else None
        types = config.layer_types if self.family.masks == "by_layer" else []
        self._windows: dict[str, int | None] = {
            kind: window if kind == "sliding_attention" else None for kind in types
        } or {"": window}
        self.eos_ids = frozenset(_ids(config) | _ids(model.generation_config) | _ids(tokenizer))
        pad_id = tokenizer.pad_token_id
        self.pad_id: int = pad_id if pad_id is not None else min(self.eos_ids, default=0)

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None
    ) -> TargetModel:
        """From a folder, a hub id, a .gguf file, a folder with one, or the name of a packaged one.

        Raises ValueError for what can't be loaded whole: see `dlite.loading`.
        """
        model, tokenizer = load_model(name, dtype=dtype, device=device, revision=revision)
        return cls(model, tokenizer, name)

    @classmethod
    def outline(cls, name: str, *, dtype: str = "bfloat16") -> TargetModel:
        """Sizes and tokenizer without weights (they lie on the meta device): to plan a run."""
        model, tokenizer = load_outline(name, dtype=dtype)
        return cls(model, tokenizer, name)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D], scaled as the model scales them."""
        return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def logits(self, hidden_D: Tensor, head_VD: Tensor | None = None) -> Tensor:
        """Logits [..., V], in float32 at least, from hidden states after the final norm.

        `head_VD`: rows of the LM head to read in place of all (a pruned draft vocabulary's).
        """
        head_VD = self.head_weight_VD if head_VD is None else head_VD
        logits_V = F.linear(hidden_D.to(head_VD.dtype), head_VD)
        logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
        if self._softcap is not None:
            logits_V = self._softcap * torch.tanh(logits_V / self._softcap)
        return logits_V

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation by the tokenizer's chat template."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {self.name} has no chat template (a base model?); "
                "use an instruction-tuned target or put a chat_template.jinja in its folder"
            )
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` rows; `capacity` tokens per row, grown when exceeded."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (batch, config.num_key_value_heads, capacity, head_dim)
        keys, values = (
            [
                torch.zeros(shape, dtype=self.dtype, device=self.device)
                for _ in range(self.num_layers)
            ]
            for _ in range(2)
        )
        return KVCache(keys, values)

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache,
        *,
        counts_B: Sequence[int] | None = None,
        tap_ids: Sequence[int] = (),
    ) -> Forward:
        """Runs tokens behind those that the cache holds, row b's from position lengths_B[b] on.

        Right-padded beyond `counts_B` (None: nothing is). Writes keys and values without
        advancing the cache. Raises ValueError beyond the target's longest sequence.
        """
        num_tokens = tokens_BT.shape[1]
        counts = counts_B or [num_tokens] * len(cache.lengths_B)
        self.check_length(max(a + n for a, n in zip(cache.lengths_B, counts, strict=True)))
        cache.place(num_tokens)
        starts = cache.lengths_B
        return self._run(tokens_BT, starts, tap_ids, **{self._cache_name: cache}, use_cache=True)

    @torch.no_grad()
    def capture(
        self, ids: list[list[int]], layer_ids: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> list[Tensor]:
        """Hidden states [S, L, D] of each sequence on `device`, layers in the order asked for.

        Raises ValueError for a sequence beyond the target's longest and for broken states.
        """
        taps: list[Tensor] = [torch.empty(0)] * len(ids)
        for batch in _batches([len(row) for row in ids], CAPTURE_TOKENS):
            lengths = [len(ids[i]) for i in batch]
            self.check_length(max(lengths))
            tokens_BT = self.pad([ids[i] for i in batch])
            out = self._run(tokens_BT, [0] * len(batch), layer_ids, use_cache=False)
            assert out.taps_BTLD is not None
            for row, (i, length) in enumerate(zip(batch, lengths, strict=True)):
                check_taps(out.taps_BTLD[row, :length], layer_ids)
                taps[i] = out.taps_BTLD[row, :length].to(device, copy=True)
        return taps

    def pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Token rows as one tensor, padded on the right."""
        width = max(len(row) for row in rows)
        padded = [[*row, *[self.pad_id] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self.device)

    def check_length(self, num_tokens: int, *, what: str = "a sequence") -> None:
        if num_tokens > self.max_length:
            raise ValueError(
                f"{what} of {num_tokens} tokens exceeds the {self.max_length} that {self.name} "
                "takes; shorten the prompt or lower max_new_tokens"
            )

    def _run(
        self, tokens_BT: Tensor, starts: list[int], tap_ids: Sequence[int], **cache: Any
    ) -> Forward:
        num_tokens = tokens_BT.shape[1]
        positions_BT = torch.arange(num_tokens, device=self.device) + torch.tensor(
            starts, device=self.device
        ).unsqueeze(1)
        masks = {
            kind: self._mask(positions_BT, starts, window) for kind, window in self._windows.items()
        }
        with tapped(self.model, self.family, tap_ids) as states:
            hidden_BTD = self._decoder(
                input_ids=tokens_BT,
                position_ids=positions_BT.clamp(max=self.max_length - 1),
                attention_mask=masks.get("", masks),
                **cache,
            ).last_hidden_state
        taps_BTLD = torch.stack([states[k] for k in tap_ids], dim=2) if tap_ids else None
        return Forward(hidden_BTD, taps_BTLD)

    def _mask(self, positions_BT: Tensor, starts: list[int], window: int | None) -> Tensor | None:
        """Additive mask [B, 1, T, S], or None where plain causal attention says the same."""
        num_tokens = positions_BT.shape[1]
        end = max(starts) + num_tokens
        same_start = len(set(starts)) == 1
        plain = same_start and (starts[0] == 0 or num_tokens == 1)
        if plain and (window is None or end <= window):
            return None
        keys_S = torch.arange(end, device=self.device)
        hidden_BTS = keys_S > positions_BT.unsqueeze(-1)
        if window is not None:
            hidden_BTS |= keys_S <= positions_BT.unsqueeze(-1) - window
        mask_BTS = torch.zeros(hidden_BTS.shape, dtype=self.dtype, device=self.device)
        return mask_BTS.masked_fill_(hidden_BTS, -torch.inf).unsqueeze(1)

    def fingerprint(self) -> dict[str, str]:
        """Short hashes by which a checkpoint recognises this target: see `dlite.fingerprint`."""
        return fingerprint(self.model, self.tokenizer)


def _ids(owner: Any) -> set[int]:
    """The end-of-sequence ids of a config or a tokenizer: none, one or several."""
    ids = getattr(owner, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices grouped by length so that no group's padded size exceeds `budget`."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[i] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
