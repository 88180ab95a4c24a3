"""vLLM's target as a draft model needs it: its embedding table, its LM head, its identity."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlite import checkpoint
from dlite.families import FAMILIES
from dlite.fingerprint import architecture_fingerprint, tokenizer_fingerprint
from dlite.model.drafter import DraftModel
from dlite.weights import dtype_name

logger = logging.getLogger("dlite")
SERVED = ("llama", "mistral", "qwen2", "qwen3")  # whose embeddings vLLM does not scale


class ServedTarget:
    """Raises ValueError for a target whose states or tables a draft model can't have."""

    def __init__(self, model: Any, vllm_config: Any, tokenizer: Any) -> None:
        from vllm.model_executor.models.interfaces import supports_eagle3

        config = vllm_config.model_config
        self.config = config.hf_text_config
        self.name: str = config.model
        kind = self.config.model_type
        if kind not in SERVED or not supports_eagle3(model):
            raise ValueError(
                f"{self.name} is of model_type {kind!r}, from which a draft model can't be served; "
                f"known are {', '.join(SERVED)}; every drafter but dlite and hybrid takes it"
            )
        assert kind in FAMILIES
        self.tokenizer = tokenizer
        self.vocab_size: int = self.config.vocab_size
        self.num_token_ids = min(len(self.tokenizer), self.vocab_size)
        self.dtype: torch.dtype = config.dtype
        tied = getattr(self.config, "tie_word_embeddings", False)
        self.embed_weight_VD = self._table(model.model.embed_tokens, "embedding table")
        self.head_weight_VD = (
            self.embed_weight_VD if tied else self._table(model.lm_head, "LM head")
        )
        self.device = self.embed_weight_VD.device

    def _table(self, module: Any, what: str) -> Tensor:
        """All rows, those of other ranks too."""
        from vllm.distributed import tensor_model_parallel_all_gather

        weight_VD = module.weight.detach()
        if not weight_VD.is_floating_point() or weight_VD.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"the {what} of {self.name} is quantized, and draft models read it; leave it in "
                "bfloat16, or draft without a draft model"
            )
        return tensor_model_parallel_all_gather(weight_VD, dim=0)[: self.vocab_size]

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_weight_VD)

    def bind(self, draft: checkpoint.Checkpoint) -> DraftModel:
        """The draft model, bound to this target. Raises ValueError for one of another target."""
        sizes = {"hidden_size": self.config.hidden_size, "vocab_size": self.vocab_size}
        for name, size in sizes.items():
            if (wanted := getattr(draft.config, name)) != size:
                raise ValueError(
                    f"the draft model needs a target of {name} {wanted}, but {self.name} has "
                    f"{size}; use the target that it was trained for"
                )
        if draft.target is not None:
            draft.target.check_identity(
                self.name,
                family=self.config.model_type,
                architecture=architecture_fingerprint(self.config),
                tokenizer=tokenizer_fingerprint(self.tokenizer),
            )
            if draft.target.dtype != dtype_name(self.dtype):
                logger.warning(
                    "the draft model was trained on %s states and is served %s ones: fewer drafts "
                    "may be accepted",
                    draft.target.dtype,
                    dtype_name(self.dtype),
                )
        if draft.template_kwargs:
            logger.warning(
                "the draft model was trained with chat_template_kwargs %s: send the same",
                draft.template_kwargs,
            )
        model = checkpoint.load(draft.folder, device=self.device, dtype=self.dtype)
        return model.bind(self)
