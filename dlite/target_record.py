"""Which target a draft model belongs to, as its checkpoint remembers it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlite.model.config import DraftConfig
from dlite.weights import dtype_name

if TYPE_CHECKING:
    from dlite.target import TargetModel


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """Which target a draft model was trained for. Fingerprints are short hex strings."""

    name: str
    family: str
    architecture: str
    weights: str
    tokenizer: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str

    @classmethod
    def of(cls, target: TargetModel) -> TargetRecord:
        return cls(
            name=str(target.name),
            family=target.model.config.model_type,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_length,
            dtype=dtype_name(target.dtype),
            **target.fingerprint(),
        )

    def check_identity(self, name: str, **found: str) -> None:
        """Raises ValueError for a target `name` with another family, architecture or tokenizer."""
        for what, value in found.items():
            if getattr(self, what) != value:
                raise ValueError(
                    f"the draft model was trained for {self.name!r} with {what} "
                    f"{getattr(self, what)}, but the target {name!r} has {value}; use the target "
                    "that it was trained for"
                )

    def check(self, target: TargetModel, *, strict: bool) -> None:
        """Another architecture or tokenizer is a ValueError, other weights a warning (an error
        with `strict`): a fine-tuned target still verifies losslessly, only with fewer accepted."""
        now = TargetRecord.of(target)
        self.check_identity(
            now.name, family=now.family, architecture=now.architecture, tokenizer=now.tokenizer
        )
        if self.weights != now.weights:
            message = (
                f"the draft model was trained for {self.name!r} (weights {self.weights}), but the "
                f"target {now.name!r} has weights {now.weights}: a fine-tuned target? "
                "Output stays the target's own, but fewer drafts may be accepted"
            )
            if strict:
                raise ValueError(message)
            warnings.warn(message, stacklevel=3)


def check_sizes(config: DraftConfig, target: TargetRecord) -> None:
    sizes = {
        "num_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        if (actual := getattr(target, name)) != size:
            raise ValueError(
                f"the draft model needs a target of {name} {size}, but {target.name!r} has "
                f"{actual}; use the target that it was trained for"
            )
