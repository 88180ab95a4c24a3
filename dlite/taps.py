"""Reading the target's hidden states: the one place where training and serving get theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dlite.families import Family


@contextmanager
def tapped(
    model: nn.Module, family: Family, layer_ids: Sequence[int]
) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of decoder layers during a forward; the only code that reads them.

    Id k is the output of 0-based layer k; the last layer's is read after the final norm.
    """
    layers = model.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    last = len(layers) - 1
    states: dict[int, Tensor] = {}

    def hook_for(layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            states[layer_id] = output

        return hook

    hooks = []
    for k in layer_ids:
        module = model.get_submodule(family.final_norm) if k == last else layers[k]
        hooks.append(module.register_forward_hook(hook_for(k)))
    try:
        yield states
    finally:
        for handle in hooks:
            handle.remove()


def check_taps(taps_NLD: Tensor, layer_ids: Sequence[int]) -> None:
    """Raises ValueError naming a layer whose states aren't finite, or are constant over D."""
    finite_NL = taps_NLD.isfinite().all(-1)
    varied_NL = (taps_NLD != taps_NLD[..., :1]).any(-1)
    if bool((finite_NL & varied_NL).all()):
        return
    for index, layer_id in enumerate(layer_ids):
        for good_NL, fault in ((finite_NL, "NaN or infinite"), (varied_NL, "constant")):
            if not bool(good_NL[:, index].all()):
                raise ValueError(
                    f"hidden states of target layer {layer_id} are {fault}; check the target's "
                    "weights, or load it with another dtype (float16 overflows: use bfloat16)"
                )
