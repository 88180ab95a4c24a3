"""What vLLM builds for `speculative_config={"method": "custom_class", "model": PROPOSER}`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dlite.drafters.base import Drafter
from dlite.vllm_plugin import check_version
from dlite.vllm_plugin.calls import Calls
from dlite.vllm_plugin.counters import PrometheusCounters
from dlite.vllm_plugin.options import Options
from dlite.vllm_plugin.taps import vllm_layer_ids

NEURAL = "dlite"


class Proposer:
    """Holds the drafters; the runner hands it each step (`dlite.vllm_plugin.runner`).

    Raises ValueError, naming value and remedy, for what can't be served.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        self.config = vllm_config
        self.options = Options.of(vllm_config)
        self.num_draft: int = vllm_config.speculative_config.num_speculative_tokens
        self.calls = Calls({}, self.num_draft)
        self.tap_ids: tuple[int, ...] = ()
        hf = vllm_config.model_config.hf_text_config
        self.num_layers: int = hf.num_hidden_layers
        parallel = vllm_config.parallel_config
        if NEURAL in self.options.drafters:
            from dlite import checkpoint

            if self.options.draft is None:
                raise ValueError("drafter 'dlite' needs a draft model; give --draft DIR")
            if parallel.pipeline_parallel_size > 1:
                raise ValueError(
                    f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: the states that "
                    "a draft model reads lie on several stages; use tensor parallelism"
                )
            self.draft = checkpoint.read(self.options.draft)
            trained = self.draft.config.num_draft_tokens
            if self.num_draft > trained and len(self.options.drafters) == 1:
                raise ValueError(
                    f"num_speculative_tokens is {self.num_draft}; the draft model was trained for "
                    f"{trained}"
                )
            if self.draft.config.num_target_layers != self.num_layers:
                raise ValueError(
                    f"the draft model reads a target of {self.draft.config.num_target_layers} "
                    f"layers, this one has {self.num_layers}; use the one it was trained for"
                )
            self.tap_ids = tuple(sorted(self.draft.config.tap_ids))

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
        from dlite.vllm_plugin.target import ServedTarget

        target = (
            ServedTarget(model, self.config, self.tokenizer)
            if NEURAL in self.options.drafters
            else None
        )
        self.calls = Calls(
            {name: self._build(name, target) for name in self.options.drafters},
            self.num_draft,
            PrometheusCounters(),
        )
        assert self.calls.tap_ids == self.tap_ids

    def _build(self, name: str, target: Any) -> Drafter:
        if name == NEURAL:
            from dlite.drafters.neural import NeuralDrafter

            return NeuralDrafter(target.bind(self.draft))
        from dlite.drafters.ngram import NgramDrafter

        return NgramDrafter(**self.options.settings.get(name, {}))

    def propose(self, *_: Any, **__: Any) -> Any:
        """vLLM's own call shows neither requests nor states."""
        raise ValueError(
            "vLLM runs without dlite's worker; add --worker-cls dlite.vllm_plugin.worker.Worker, "
            "or start it with dlite serve"
        )
