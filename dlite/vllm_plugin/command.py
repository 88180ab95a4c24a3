"""How vLLM is told to use dlite: arguments of its engine, and the same as a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlite.vllm_plugin.options import KEY

WORKER = "dlite.vllm_plugin.worker.Worker"
PROPOSER = "dlite.vllm_plugin.proposer.Proposer"
MIDDLEWARE = "dlite.vllm_plugin.middleware.Tenants"


def engine_arguments(
    drafters: Sequence[str],
    draft: Path | str | None,
    num_draft: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: the first of `drafters` is the default."""
    options: dict[str, Any] = {"drafters": list(drafters)}
    if draft is not None:
        options["draft"] = str(draft)
    if settings:
        options["settings"] = {name: dict(values) for name, values in settings.items()}
    return {
        "worker_cls": WORKER,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": num_draft,
        },
        "additional_config": {KEY: options},
    }
