"""What a draft model is: four axes, and the sizes that it takes from its target."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Context = Literal["taps", "history", "taps+history"]
Composition = Literal["sequence", "feature"]
Head = Literal["lowrank", "tied", "markov", "none"]
FirstPredictor = Literal["placeholder", "anchor"]


def default_tap_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """First and last layer and an even spread between (DESIGN 3.1); ids are 0-based layers.

    >>> default_tap_ids(36, 12)
    (0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35)
    """
    n = num_target_layers
    if not 2 <= num_taps <= n:
        raise ValueError(f"num_taps is {num_taps}; give 2 to {n} for a target of {n} layers")
    if num_taps < 4:
        return tuple(sorted({0, *([n // 2] if num_taps == 3 else []), n - 1}))
    spread = {math.floor(1 + (n - 3) * i / (num_taps - 3) + 0.5) for i in range(num_taps - 2)}
    return tuple(sorted({0, n - 1} | spread))


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft model's architecture. Everything a server needs besides the target itself.

    Sizes named as in Hugging Face are the target's unless a checkpoint says otherwise
    (`head_dim` may differ from hidden_size / num_attention_heads).
    """

    tap_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_hidden_layers: int = 5
    num_draft_tokens: int = 7  # K
    context: Context = "taps"
    composition: Composition = "sequence"
    head: Head = "lowrank"
    first_predictor: FirstPredictor = "placeholder"
    history_window: int = 128  # W; 0: all positions. Of no effect with context == "taps".
    history_sinks: int = 0  # a sample's first positions, seen beside the window (StreamingLLM)
    rank: int = 0  # R; 0: hidden_size // 8
    draft_vocab_size: int = 0  # 0: the target's whole vocabulary
    mask_token_id: int | None = None  # None: a learned placeholder vector
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        for name, kind in (
            ("context", Context),
            ("composition", Composition),
            ("head", Head),
            ("first_predictor", FirstPredictor),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(get_args(kind))}")
        object.__setattr__(self, "tap_ids", tuple(int(k) for k in self.tap_ids))
        if not self.tap_ids:
            raise ValueError("tap_ids is empty; name the target layers that the draft reads")
        bad = [k for k in self.tap_ids if not 0 <= k < self.num_target_layers]
        if bad or len(set(self.tap_ids)) != len(self.tap_ids):
            raise ValueError(
                f"tap_ids {list(self.tap_ids)} must be distinct layers of 0 .. "
                f"{self.num_target_layers - 1}"
            )
        if self.context == "history" and self.composition == "sequence":
            raise ValueError(
                "composition 'sequence' gives a position one key per layer; context 'history' "
                "needs composition 'feature'"
            )
        if min(self.history_window, self.history_sinks) < 0:
            raise ValueError(
                f"history_window is {self.history_window} and history_sinks {self.history_sinks}; "
                "give counts of positions (history_window 0: all)"
            )
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}; give at least 1")
        if self.rank == 0:
            object.__setattr__(self, "rank", self.hidden_size // 8)
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def pruned(self) -> bool:
        """Whether drafts come from fewer ids than the target knows."""
        return 0 < self.draft_vocab_size < self.vocab_size

    @property
    def num_draft_ids(self) -> int:
        return self.draft_vocab_size if self.pruned else self.vocab_size

    @property
    def history_layer_ids(self) -> tuple[int, int, int]:
        """The target layers of the history branch: first, middle, last (post-norm)."""
        return (0, self.num_target_layers // 2, self.num_target_layers - 1)

    @property
    def packed_layer_ids(self) -> tuple[int, ...]:
        """The target layers that a history holds of each position. Without a history of its own:
        those that a teacher's holds."""
        return self.tap_ids if self.context == "history" else self.history_layer_ids

    @property
    def state_layer_ids(self) -> tuple[int, ...]:
        """All target layers that this model reads, in ascending order."""
        history = self.history_layer_ids if self.context == "taps+history" else ()
        return tuple(sorted({*self.tap_ids, *history}))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tap_ids": list(self.tap_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DraftConfig:
        """Raises ValueError for an unknown or a missing key."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown draft config keys {unknown}; known are {sorted(known)}")
        if "tap_ids" not in values:
            raise ValueError(
                "the draft config has no tap_ids (which target layers it reads); a guess would "
                "draft garbage, so export the checkpoint again with them"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"incomplete draft config: {error}") from None
