"""Several processes: how they find each other, share an optimizer step, and gather what is split.

Works under `accelerate launch` and `torchrun`, on GPUs and (gloo) on CPUs, with DDP, DeepSpeed ZeRO
and FSDP2 as accelerate is told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import Tensor, nn

if TYPE_CHECKING:
    from train.config import TrainConfig


def start(config: TrainConfig, folder: Path) -> Accelerator:
    """Raises ValueError for a launch in which a process believes that it is alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    on_cpu = world > 1 and not torch.cuda.is_available()
    if on_cpu and fsdp:
        raise ValueError("accelerate has no FSDP on CPU; use DDP or DeepSpeed there, or GPUs")
    handlers = []
    if on_cpu and deepspeed:
        _deepspeed_on_cpu()
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32 for the vocabulary's float32 product
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,
        mixed_precision=config.mixed_precision,
        log_with=config.tracker,
        project_dir=str(folder),
        kwargs_handlers=handlers,
    )
    check_launch(accelerator, world, deepspeed=deepspeed)
    if deepspeed:
        _complete_deepspeed(accelerator, config)
    return accelerator


def _deepspeed_on_cpu() -> None:
    """Switches off an op that DeepSpeed (0.19.8) would compile for minutes before its processes
    meet; a killed run leaves a lock on which the next one waits for ever."""
    import deepspeed.ops  # pyright: ignore[reportMissingImports]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _complete_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Our loop sets micro-batches, their number and the clipping; a config file cannot know.

    Only the trainee is split: told of ZeRO-3, transformers would load the target in splinters, too,
    with an embedding and a head of no rows.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    plugin = accelerator.deepspeed_plugin
    assert plugin is not None
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.clip,
        "steps_per_print": 10**9,
    }
    unset_hf_deepspeed_config()


def check_launch(accelerator: Accelerator, world: int, *, deepspeed: bool) -> None:
    kind = accelerator.distributed_type
    if accelerator.num_processes != world or deepspeed != (kind == DistributedType.DEEPSPEED):
        raise ValueError(
            f"process {os.environ.get('RANK', '0')} of {world} sees {accelerator.num_processes} "
            f"processes ({kind.value}) and would train on its own; launch with `accelerate launch "
            "-m train.run`, and name a back end that this machine has"
        )


def check_same_everywhere(accelerator: Accelerator, what: str, value: Any) -> None:
    """Raises ValueError on all ranks when they do not hold one and the same value (N26)."""
    values = gather_object([value])
    if any(other != values[0] for other in values):
        raise ValueError(
            f"{what} differs between processes: {values}; give all nodes the same files and "
            "settings"
        )


@contextmanager
def accumulating(accelerator: Accelerator, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
    """Around a micro-batch. Gradients meet (and DeepSpeed steps) in the last one of a step."""
    accelerator.gradient_state._set_sync_gradients(last)  # its public form counts equal batches
    if last:
        yield
    else:
        with accelerator.no_sync(wrapped):
            yield


def splits_weights(accelerator: Accelerator) -> bool:
    """Whether a rank's own module may hold less than the whole float32 weights."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def whole_weights(accelerator: Accelerator, module: nn.Module) -> dict[str, Tensor]:
    """The state dict of `module`, whole and in the masters' precision, on every rank. All ranks
    must call it; `module` is what was prepared, or a part of it."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _from_deepspeed(module)
    if accelerator.distributed_type == DistributedType.FSDP:
        from torch.distributed.tensor import DTensor

        own = module.state_dict()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in own.items()}
    return module.state_dict()


def _from_deepspeed(module: nn.Module) -> dict[str, Tensor]:
    from deepspeed import zero  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
        safe_get_full_fp32_param,
    )

    weights = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if master is None:
            with zero.GatheredParameters([parameter]):
                master = parameter.detach().clone()
        weights[name] = master.to(parameter.device)
    return weights
