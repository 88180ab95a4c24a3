"""Everything that is changed in vLLM, each with its versions and when it may go.

All are for vLLM 0.32 (`dlite.vllm_plugin.TESTED`; nothing is applied outside). Applying twice does
nothing.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def apply() -> None:
    from vllm.platforms import current_platform

    _refuse_bad_metadata()
    if current_platform.is_cpu():
        _expand_on_cpu()


def _refuse_bad_metadata() -> None:
    """A request whose `dlite_` arguments are wrong is refused when it arrives (HTTP 400).

    vLLM offers custom validation only in logits processors, which it refuses beside speculation.
    Goes when requests can be validated by a plugin.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from dlite.metadata import parse_metadata

    original = InputProcessor._validate_params
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def validate(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            metadata = parse_metadata(getattr(params, "extra_args", None))
            _check_drafter(metadata.drafter, self.vllm_config)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        return original(self, params, *args, **kwargs)

    InputProcessor._validate_params = validate


def _check_drafter(name: str, vllm_config: Any) -> None:
    from dlite.vllm_plugin.options import PLAIN, Options

    if not name or name == PLAIN:
        return
    loaded = Options.of(vllm_config).drafters
    if name not in loaded:
        raise ValueError(
            f"dlite_drafter is {name[:40]!r}; this server has {', '.join([*loaded, PLAIN])}"
        )


def _expand_on_cpu() -> None:
    """Sampling at T > 0 is verified against the requests' own temperature, top-k and top-p.

    Without Triton's CPU backend, `expand_batch_to_tokens` gives its C++ kernel an int64 copy of
    the output and returns the original, which is uninitialised memory. Goes when the kernel writes
    to its output (tests/test_vllm_sampling.py fails without it).
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample import rejection_sampler

    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """One value a request as one value a token, `replace_from` replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.long(), output_size=num_tokens)
    return expanded.masked_fill_(expanded == replace_from, replace_to)


@contextmanager
def cpu_model_runner(runner: type) -> Iterator[None]:
    """The CPU worker builds `runner`: it has no method to override, as the CUDA worker does.
    Goes when it has one."""
    from vllm.v1.worker import cpu_worker

    original = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = runner
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = original
