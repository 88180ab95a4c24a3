"""Peak memory and arithmetic of a training step, from shapes alone.

What backward keeps is counted exactly: the draft's forward runs on fake tensors (shapes without
data) and every tensor that autograd saves is weighed. The rest is arithmetic; tests and
`scripts/gpu_check.sh` hold the sum against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.losses import CHUNK_ELEMENTS
from dlite.model.masks import Blocks, History
from dlite.target import CAPTURE_TOKENS, TargetModel
from dlite.weights import without_data

# Dense bfloat16 peaks by a part of the device's name, from the makers' data sheets.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}
LOSS_TENSORS = 9  # [chunk, V] float32 tensors of `row_terms` and its backward alive at once


@dataclass(frozen=True, slots=True)
class TargetSizes:
    num_parameters: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    bytes_per_value: int

    @classmethod
    def of(cls, target: TargetModel) -> TargetSizes:
        return cls(
            sum(p.numel() for p in target.model.parameters()),
            target.hidden_size,
            target.model.config.intermediate_size,
            target.vocab_size,
            target.dtype.itemsize,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """The largest micro-batch of a rank."""

    tokens: int
    anchors: int
    longest: int  # tokens of its longest sample


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. `masters` are float32 weights, gradients and two moments."""

    target: int
    masters: int
    states: int
    saved_for_backward: int
    loss: int
    target_forward: int

    @property
    def peak(self) -> int:
        """The target's forward is over when the draft's begins."""
        resident = self.target + self.masters + self.states
        return resident + max(self.target_forward, self.saved_for_backward + self.loss)


def memory(
    draft: DraftConfig,
    target: TargetSizes,
    load: Load,
    *,
    num_state_layers: int,
    teacher: DraftConfig | None = None,
    bf16: bool = False,
    ranks: int = 1,
    checkpointing: bool = False,
) -> Memory:
    """`ranks` > 1: weights, gradients and moments are split over so many (ZeRO-3, FSDP2)."""
    num_parameters = parameters(draft)
    width, D = target.bytes_per_value, target.hidden_size
    padded = max(min(load.tokens, CAPTURE_TOKENS), load.longest)
    layer_transient = padded * (3 * target.intermediate_size + 6 * D) * width
    captured = load.tokens * num_state_layers * D * width
    features = draft.rank if draft.head == "lowrank" else D
    rows = max(1, CHUNK_ELEMENTS // (draft.num_draft_ids * draft.num_draft_tokens))
    chunk = rows * draft.num_draft_tokens * draft.num_draft_ids * 4
    vocab_gradient = draft.num_draft_ids * draft.rank * 4 if draft.head == "lowrank" else 0
    label_states = load.anchors * draft.num_draft_tokens * D * width
    taps = load.anchors * len(draft.tap_ids) * D * width
    per_rank = 16 * num_parameters // ranks
    return Memory(
        target=target.num_parameters * width,
        masters=per_rank + (parameters(teacher) * 4 if teacher else 0),
        states=captured + label_states + taps,
        saved_for_backward=saved_bytes(draft, load, width, bf16=bf16, checkpointing=checkpointing),
        loss=LOSS_TENSORS * chunk
        + vocab_gradient
        + 2 * load.anchors * draft.num_draft_tokens * features * 4,
        target_forward=layer_transient + padded * num_state_layers * D * width,
    )


def parameters(config: DraftConfig) -> int:
    return sum(p.numel() for p in without_data(config).parameters())


def saved_bytes(
    config: DraftConfig,
    load: Load,
    state_bytes: int,
    *,
    bf16: bool = False,
    checkpointing: bool = False,
) -> int:
    """Bytes that autograd keeps from a forward over `load`, parameters left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks

    if config.context != "taps" and not config.history_window:
        config = replace(config, history_window=load.longest)  # all positions: as wide as that
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[state_bytes]
    kept: dict[int, int] = {}

    def weigh(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(tensor)  # an address must not be used twice
        return tensor

    alive: list[Tensor] = []
    with FakeTensorMode():
        model = DraftModel(config)
        model.checkpointing = checkpointing
        model.bind(_borrowed(config, dtype))  # pyright: ignore[reportArgumentType]
        blocks, prev_AK = _inputs(config, load, dtype)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
        with saved_tensors_hooks(weigh, lambda t: t), autocast:
            features_AKF = model(blocks, prev_AK)
        owned = {p.untyped_storage()._cdata for p in model.parameters()}
        states = blocks.taps_ALD.untyped_storage()._cdata
        del features_AKF
    return sum(size for key, size in kept.items() if key not in owned | {states})


def _borrowed(config: DraftConfig, dtype: torch.dtype) -> SimpleNamespace:
    D, V = config.hidden_size, config.vocab_size
    return SimpleNamespace(
        embed=lambda ids: torch.empty(*ids.shape, D, dtype=dtype),
        head_weight_VD=torch.empty(V, D, dtype=dtype),
        num_token_ids=V,
    )


def _inputs(config: DraftConfig, load: Load, dtype: torch.dtype) -> tuple[Blocks, Tensor]:
    A, D = load.anchors, config.hidden_size
    anchor_A = torch.zeros(A, dtype=torch.long)
    taps_ALD = torch.empty(A, len(config.tap_ids), D, dtype=dtype)
    prev_AK = torch.zeros(A, config.num_draft_tokens, dtype=torch.long)
    history = None
    if config.context != "taps":
        states_SCD = torch.empty(load.tokens, len(config.packed_layer_ids), D, dtype=dtype)
        history = History(states_SCD, anchor_A, anchor_A)
    return Blocks(anchor_A, taps_ALD, history), prev_AK


def peak_flops(device: torch.device | str) -> float | None:
    """Of the device in bfloat16, None where it is not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def flops(
    draft: DraftConfig,
    target: TargetSizes,
    load: Load,
    *,
    teacher: DraftConfig | None = None,
    target_logits: bool = True,
) -> float:
    """Floating-point operations of a step: the target's forward (2 per weight and token), the
    draft's forward and backward (6 per weight and row; 3 times its attention's), the target's
    logits for TV, a teacher's forward. Attention inside the target is left out."""
    body = target.num_parameters - target.vocab_size * target.hidden_size
    total = 2.0 * body * load.tokens + 3 * _forward_flops(draft, load)
    if target_logits:
        rows = load.anchors * draft.num_draft_tokens
        total += 2.0 * rows * target.hidden_size * target.vocab_size
    return total + (_forward_flops(teacher, load) if teacher else 0.0)


def _forward_flops(c: DraftConfig, load: Load) -> float:
    width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block, slots = c.num_draft_tokens + 1, len(c.tap_ids)
    window = 0 if c.context == "taps" else c.history_window or load.longest
    row = c.hidden_size * (2 * width + 2 * kv + 3 * c.intermediate_size)
    context = slots * c.hidden_size * 2 * kv
    attention = 2 * block * (window + slots + block) * width
    per_anchor = c.num_hidden_layers * (block * row + context + attention)
    features = c.rank if c.head == "lowrank" else c.hidden_size
    head = 6 * c.rank**2 + c.rank * c.hidden_size + features * c.num_draft_ids
    per_anchor += c.num_draft_tokens * head
    history = 0
    if c.context != "taps":
        history = load.tokens * c.hidden_size * (3 * c.hidden_size + 2 * kv * c.num_hidden_layers)
    return 2.0 * (load.anchors * per_anchor + history)
