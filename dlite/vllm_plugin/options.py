"""What a server is told of its drafters: vLLM's `additional_config["dlite"]`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

KEY = "dlite"
PLAIN = "none"  # the `dlite_drafter` of a request that wants no drafts


@dataclass(frozen=True, slots=True)
class Options:
    """`drafters`: the first one serves requests that name none. `draft`: the draft model of those
    that need one. `settings`: by drafter, what its constructor takes."""

    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    draft: str | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.drafters or len(set(self.drafters)) != len(self.drafters):
            raise ValueError(f"drafters are {self.drafters}; name each one once")
        if unknown := sorted(self.settings.keys() - set(self.drafters)):
            raise ValueError(f"settings for {unknown[0]!r}, which is none of {self.drafters}")

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """Raises ValueError for an unknown key."""
        given = vllm_config.additional_config
        values = given.get(KEY, {}) if isinstance(given, dict) else {}
        known = [f.name for f in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise ValueError(f"unknown option {unknown[0]!r} of {KEY}; known are {known}")
        return cls(**values)
