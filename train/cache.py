"""Target states on disk: computed once, read by any number of runs.

For each sample a fixed set of anchors is drawn once; epochs subsample it. Kept are the taps at a-1,
the last layer's state at every label row and, if a stage reads a history, its layers at all
positions. Shards are safetensors files; the manifest is written last, so a folder without one is
unfinished. Held-out samples keep every anchor: rollouts choose theirs as they go.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from dlite.files import write_atomically
from dlite.target import TargetModel
from train.batches import label_rows
from train.data import Sample, anchors
from train.states import log_normalisers

MANIFEST = "manifest.json"
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "float32": torch.float32,
}
CACHE_EPOCH = -2  # an epoch that no run has: whose anchors a cache keeps
SHARD_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides a cache's content. `history_ids` is empty where no stage reads a history."""

    weights: str
    tokenizer: str
    samples: str  # a hash of all samples
    template_kwargs: str
    tap_ids: tuple[int, ...]
    history_ids: tuple[int, ...]
    last: int  # layer of the post-norm states
    num_draft: int
    anchors_per_sample: int
    seed: int
    dtype: str

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self.tap_ids, *self.history_ids, self.last}))

    def kept(self, sample: Sample, *, held_out: bool) -> list[int]:
        limit = len(sample.input_ids) if held_out else self.anchors_per_sample
        return anchors(sample, self.seed, CACHE_EPOCH, limit)

    def rows(self, sample: Sample, kept: list[int]) -> Tensor:
        """Label rows of the anchors [R], ascending: where p is needed."""
        label_AK, _ = label_rows(torch.tensor(kept), sample, self.num_draft)
        return (label_AK - 1).unique()

    def num_bytes(self, sample: Sample, kept: list[int], hidden_size: int) -> int:
        vectors = len(kept) * len(self.tap_ids) + len(self.rows(sample, kept))
        vectors += len(sample.input_ids) * len(self.history_ids)
        return vectors * hidden_size * DTYPES[self.dtype].itemsize


def write(
    folder: Path,
    layout: Layout,
    target: TargetModel,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    accelerator: Accelerator,
    limit_bytes: float,
) -> None:
    """Captures every sample, each rank some shards. Raises ValueError above `limit_bytes`."""
    everything = [(s, False) for s in train] + [(s, True) for s in held_out]
    size = sum(
        layout.num_bytes(s, layout.kept(s, held_out=held), target.hidden_size)
        for s, held in everything
    )
    if accelerator.is_main_process:
        print(f"cache {folder}: {len(everything):,} samples, {size / 1e9:.2f} GB")
    if size > limit_bytes:
        raise ValueError(
            f"the cache would take {size / 1e9:.1f} GB, above data.cache_limit_gb "
            f"{limit_bytes / 1e9:.1f}; say data.cache_yes=true, lower optim.anchors_per_sample, or "
            "use data.states=live"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shards = [everything[i : i + SHARD_SAMPLES] for i in range(0, len(everything), SHARD_SAMPLES)]
    for number in range(accelerator.process_index, len(shards), accelerator.num_processes):
        tensors: dict[str, Tensor] = {}
        for sample, held in tqdm(shards[number], f"cache shard {number}", disable=None):
            parts = capture(layout, target, sample, layout.kept(sample, held_out=held))
            tensors |= {f"{sample.id}/{name}": value for name, value in parts.items()}
        save_file(tensors, folder / _shard_name(number))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        names = {s.id: i // SHARD_SAMPLES for i, (s, _) in enumerate(everything)}
        sizes = [(folder / _shard_name(i)).stat().st_size for i in range(len(shards))]
        manifest = {"layout": asdict(layout), "shard_of": names, "shard_bytes": sizes}
        write_atomically(folder / MANIFEST, json.dumps(manifest))
    accelerator.wait_for_everyone()


def _shard_name(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def capture(
    layout: Layout, target: TargetModel, sample: Sample, kept: list[int]
) -> dict[str, Tensor]:
    """One sample's tensors. All-zero or constant states are refused by `capture` itself (A16)."""
    (states_SCD,) = target.capture([sample.input_ids], layout.layer_ids)
    column, dtype = {k: i for i, k in enumerate(layout.layer_ids)}, DTYPES[layout.dtype]
    anchor_A, row_R = torch.tensor(kept), layout.rows(sample, kept)
    last_SD = states_SCD[:, column[layout.last]]
    log_z_S = log_normalisers(target, sample, states_SCD)
    parts = {
        "anchors": anchor_A,
        "taps": states_SCD[anchor_A - 1][:, [column[k] for k in layout.tap_ids]].to(dtype),
        "rows": row_R,
        "last": last_SD[row_R].to(dtype),
        "log_z": log_z_S[row_R],
    }
    if layout.history_ids:
        parts["history"] = states_SCD[:, [column[k] for k in layout.history_ids]].to(dtype)
    return {name: value.contiguous() for name, value in parts.items()}


class CachedStates:
    """Reads a finished cache. Rows that it does not hold are NaN: using one stops the run.

    Raises ValueError for a cache of other contents than `layout` and names a damaged shard.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout, self.layer_ids = folder, layout, layout.layer_ids
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        ours = json.loads(json.dumps(asdict(layout)))
        other = [k for k, v in manifest["layout"].items() if ours.get(k) != v]
        if other:
            raise ValueError(
                f"cache {folder} was made with another {', '.join(other)}; name another folder, or "
                "delete it to make it anew"
            )
        self._shard_of: dict[str, int] = manifest["shard_of"]
        for number, size in enumerate(manifest["shard_bytes"]):
            file = folder / _shard_name(number)
            if not file.is_file() or file.stat().st_size != size:
                raise ValueError(f"cache shard {file} is missing or cut; delete {folder}")
        self._open: dict[int, Any] = {}

    def pool(self, sample: Sample) -> list[int]:
        """The anchors that the cache holds of a sample."""
        return self._get(sample, "anchors").tolist()

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self._expand(sample) for sample in samples]

    def log_z(self, samples: Sequence[Sample]) -> list[Tensor]:
        found = []
        for sample in samples:
            log_z_S = torch.full((len(sample.input_ids),), torch.nan)
            log_z_S[self._get(sample, "rows")] = self._get(sample, "log_z")
            found.append(log_z_S)
        return found

    def _expand(self, sample: Sample) -> Tensor:
        column = {k: i for i, k in enumerate(self.layer_ids)}
        taps_ALD = self._get(sample, "taps").float()
        shape = len(sample.input_ids), len(self.layer_ids), taps_ALD.shape[-1]
        states_SCD = torch.full(shape, torch.nan)
        if self.layout.history_ids:
            history = self._get(sample, "history").float()
            states_SCD[:, [column[k] for k in self.layout.history_ids]] = history
        rows, last = self._get(sample, "rows"), self._get(sample, "last").float()
        states_SCD[rows, column[self.layout.last]] = last
        before_A = self._get(sample, "anchors") - 1
        for i, layer in enumerate(self.layout.tap_ids):
            states_SCD[before_A, column[layer]] = taps_ALD[:, i]
        return states_SCD

    def _get(self, sample: Sample, name: str) -> Tensor:
        number = self._shard_of[sample.id]
        file = self.folder / _shard_name(number)
        try:
            if number not in self._open:
                self._open[number] = safe_open(file, "pt")
            return self._open[number].get_tensor(f"{sample.id}/{name}")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"cache shard {file} is damaged ({error}); delete {self.folder}"
            ) from None
