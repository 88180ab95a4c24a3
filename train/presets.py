"""Published prompt collections that DLite was trained on, by one name each.

DLite section 5.1 and appendix A: 1.3M samples of Open-PerfectBlend and 600K of Nemotron
Post-Training v2, prompts only; answers are the target's. Which parts of Nemotron the paper took is
not said: ours are the first 150K rows of each English split.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The first `num_rows` rows of a hub data set's split."""

    hub: str
    split: str
    num_rows: int


_NEMOTRON = "nvidia/Nemotron-Post-Training-Dataset-v2"
PRESETS = {
    "open-perfectblend": [Part("mlabonne/open-perfectblend", "train", 1_300_000)],
    "nemotron-v2": [Part(_NEMOTRON, split, 150_000) for split in ("chat", "code", "math", "stem")],
}
PRESETS["dlite-paper"] = [*PRESETS["open-perfectblend"], *PRESETS["nemotron-v2"]]
