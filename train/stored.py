"""Samples on disk: tokenised once, mapped by every process and every run that reads them.

A folder holds the ids (uint32) and masks of all samples behind each other, where each one ends,
their names, how often each id occurs and, written last, a manifest. A process needs no memory for
tokens; as lists they would take 40 bytes each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dlite.files import writable, write_atomically
from dlite.target import TargetModel
from train.data import Sample, read_samples, report

MANIFEST = "manifest.json"


class StoredSamples(Sequence[Sample]):
    """The samples of a folder, or the given ones of them."""

    def __init__(self, folder: Path, indices: Sequence[int] | None = None) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        self.ends_N = np.load(folder / "ends.npy", mmap_mode="r")
        self._ids_T = np.memmap(folder / "ids", np.uint32, "r")
        self._mask_T = np.memmap(folder / "mask", np.bool_, "r")
        self.names: list[str] = json.loads((folder / "names.json").read_text())
        self.indices = range(len(self.names)) if indices is None else indices
        if not len(self._ids_T) == len(self._mask_T) == self.manifest["tokens"]:
            raise ValueError(f"{folder} is cut; delete it and tokenize again")

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        n = self.indices[index]
        part = slice(int(self.ends_N[n - 1]) if n else 0, int(self.ends_N[n]))
        return Sample(self.names[n], self._ids_T[part].tolist(), self._mask_T[part].tolist())

    def picked(self, indices: Sequence[int]) -> StoredSamples:
        return StoredSamples(self.folder, indices)

    def left_out(self) -> list[int]:
        """Indices of the folder's samples that are not among these."""
        return sorted(set(range(len(self.names))) - set(self.indices))

    def counts(self, what: str) -> Tensor:
        """How often each id occurs in all samples [V]: as a "label", or "anywhere"."""
        return torch.from_numpy(np.load(self.folder / f"{what}.npy"))

    def check(self, made_with: dict[str, Any]) -> None:
        """Raises ValueError where the samples were made with other settings."""
        then = self.manifest["made_with"]
        other = [k for k, v in json.loads(json.dumps(made_with)).items() if then.get(k) != v]
        if other:
            raise ValueError(
                f"{self.folder} was tokenised with another {', '.join(other)} "
                f"({', '.join(f'{k}={then.get(k)}' for k in other)}); use it, or tokenize anew"
            )


def stored(sources: Sequence[str]) -> StoredSamples | None:
    """The samples of `sources` if they are one folder that `train.data tokenize` wrote."""
    if len(sources) == 1 and (Path(sources[0]) / MANIFEST).is_file():
        return StoredSamples(Path(sources[0]))
    return None


def digest_of(samples: Iterable[Sample]) -> str:
    if isinstance(samples, StoredSamples):
        return samples.manifest["digest"]
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(_bytes(sample))
    return digest.hexdigest()[:16]


def _bytes(sample: Sample) -> bytes:
    return f"{sample.id} {sample.input_ids} {sample.loss_mask}".encode()


def split(
    samples: Sequence[Sample], num_held_out: int
) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Samples to train on, and held-out ones, chosen by their ids alone."""
    on_disk = isinstance(samples, StoredSamples)
    names = samples.names if on_disk else [s.id for s in samples]
    if num_held_out >= len(names):
        raise ValueError(
            f"data.eval_samples is {num_held_out} of {len(names)} samples; leave some to train on"
        )
    ranked = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).hexdigest())
    held_out = sorted(ranked[:num_held_out])
    trained = sorted(ranked[num_held_out:])
    if on_disk:
        return samples.picked(trained), samples.picked(held_out)
    return [samples[i] for i in trained], [samples[i] for i in held_out]


@dataclass
class Tokenize:
    """Tokenises rows once into a folder, for `train.run data.train=[FOLDER]`. Millions of samples
    are then mapped from disk in place of being held by every process."""

    target: str
    data: list[str]
    out: str
    max_length: int = 4096
    last_turn_only: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


def made_with(target: TargetModel, settings: Any, template_kwargs: dict[str, Any]) -> dict:
    """What decides which samples rows become; `settings` are a run's or this program's."""
    return {
        "tokenizer": target.fingerprint()["tokenizer"],
        "max_length": settings.max_length,
        "last_turn_only": settings.last_turn_only,
        "template_kwargs": dict(template_kwargs),
    }


def tokenize(config: Tokenize) -> None:
    folder = writable(Path(config.out), "out")
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds samples already; name another out=, or delete it")
    target = TargetModel.load(config.target)
    samples, rejected = read_samples(
        config.data,
        target,
        max_length=config.max_length,
        last_turn_only=config.last_turn_only,
        template_kwargs=config.template_kwargs,
        limit=config.limit,
    )
    ends, names, digest = [0], [], hashlib.sha256()
    counts = {name: np.zeros(target.vocab_size, np.int64) for name in ("label", "anywhere")}
    with (folder / "ids").open("wb") as ids_file, (folder / "mask").open("wb") as mask_file:
        for sample in tqdm(samples, "samples", disable=None):
            ids_S = np.array(sample.input_ids, np.uint32)
            mask_S = np.array(sample.loss_mask, np.bool_)
            ids_file.write(ids_S.tobytes())
            mask_file.write(mask_S.tobytes())
            names.append(sample.id)
            ends.append(ends[-1] + len(ids_S))
            digest.update(_bytes(sample))
            np.add.at(counts["anywhere"], ids_S, 1)
            np.add.at(counts["label"], ids_S[mask_S], 1)
    report(config.data, len(names), rejected)
    np.save(folder / "ends.npy", np.array(ends[1:], np.int64))
    for name, counts_V in counts.items():
        np.save(folder / f"{name}.npy", counts_V)
    (folder / "names.json").write_text(json.dumps(names))
    manifest = {
        "made_with": made_with(target, config, config.template_kwargs),
        "sources": config.data,
        "samples": len(names),
        "tokens": ends[-1],
        "digest": digest.hexdigest()[:16],
        "rejected": dict(rejected),
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    print(f"{len(names):,} samples, {ends[-1]:,} tokens, {ends[-1] * 5 / 1e9:.2f} GB in {folder}")
