"""What vLLM builds for `speculative_config={"method": "custom_class", "model": PROPOSER}`."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import cached_property
from typing import Any

from dlite import checkpoint
from dlite.drafters import registry
from dlite.drafters.base import Drafter
from dlite.drafters.neural import NeuralDrafter
from dlite.hybrid import Hybrid
from dlite.model.drafter import DraftModel
from dlite.planner import Planner
from dlite.vllm_plugin import check_version
from dlite.vllm_plugin.calls import Calls
from dlite.vllm_plugin.counters import Counters, prometheus
from dlite.vllm_plugin.options import Options
from dlite.vllm_plugin.taps import vllm_layer_ids

NEURAL, HYBRID = "dlite", "hybrid"
CHEAP = ("survival",)  # beside the draft model in a hybrid, unless its settings say otherwise


class Proposer:
    """Holds the drafters; the runner hands it each step (`dlite.vllm_plugin.runner`).

    Raises ValueError, naming value and remedy, for what can't be served.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        self.config = vllm_config
        self.options = Options.of(vllm_config)
        self.num_draft: int = vllm_config.speculative_config.num_speculative_tokens
        self.num_layers: int = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.calls = Calls({}, self.num_draft)
        self.planner: Planner | None = None
        self.draft = self._read_draft() if {NEURAL, HYBRID} & set(self.options.drafters) else None
        self.tap_ids = tuple(sorted(self.draft.config.tap_ids)) if self.draft else ()

    def _read_draft(self) -> checkpoint.Checkpoint:
        if self.options.draft is None:
            raise ValueError("drafters dlite and hybrid need a draft model; give --draft DIR")
        draft = checkpoint.read(self.options.draft)
        trained, layers = draft.config.num_draft_tokens, draft.config.num_target_layers
        if self.num_draft > trained and self.options.drafters == [NEURAL]:
            raise ValueError(
                f"num_speculative_tokens is {self.num_draft}; the draft model was trained for "
                f"{trained}"
            )
        if layers != self.num_layers:
            raise ValueError(
                f"the draft model reads a target of {layers} layers, this one has "
                f"{self.num_layers}; use the one that it was trained for"
            )
        return draft

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        config = self.config.model_config
        return AutoTokenizer.from_pretrained(config.tokenizer, revision=config.tokenizer_revision)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Of vLLM's kind, for `set_aux_hidden_state_layers`."""
        return vllm_layer_ids(self.tap_ids, self.num_layers)

    def load_model(self, model: Any) -> None:
        """Called by the runner once the target is loaded."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from dlite.vllm_plugin.target import ServedTarget

        bound = None
        if self.draft is not None:
            bound = ServedTarget(model, self.config, self.tokenizer).bind(self.draft)
        self.calls = Calls(
            {name: self._build(name, bound) for name in self.options.drafters},
            self.num_draft,
            prometheus() if get_tensor_model_parallel_rank() == 0 else Counters(),
        )

    def _build(self, name: str, bound: DraftModel | None) -> Drafter:
        settings = self.options.settings.get(name, {})
        if name == NEURAL:
            assert bound is not None
            # Ranks can't draw the same tokens: several draft by argmax, which is lossless, too.
            return NeuralDrafter(bound, argmax=self.config.parallel_config.tensor_parallel_size > 1)
        if name == HYBRID:
            assert bound is not None
            self.planner = Planner()
            cheap = settings.get("drafters", CHEAP)
            built = [
                registry.build(one, settings.get(one), tokenizer=self.tokenizer) for one in cheap
            ]
            return Hybrid([*built, NeuralDrafter(bound, argmax=True)], self.planner)
        return registry.build(name, settings, tokenizer=self.tokenizer)

    def propose(self, *_: Any, **__: Any) -> Any:
        """vLLM's own call shows neither requests nor states."""
        raise ValueError(
            "vLLM runs without dlite's worker; add --worker-cls dlite.vllm_plugin.worker.Worker, "
            "or start it with dlite serve"
        )
