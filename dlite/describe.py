"""What `dlite inspect` says of draft models, targets, static corpora and this environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlite.decode import DecodeResult
    from dlite.target import TargetModel


def draft_lines(name: str) -> dict[str, Any]:
    from dlite import checkpoint

    found = checkpoint.read(name)
    lines = {
        "kind": f"draft model, {found.layout} layout, {found.dtype}",
        "folder": found.folder,
        "parameters": f"{found.num_parameters():,}",
        **found.config.to_dict(),
        "target": found.target.name if found.target else "not stated",
    }
    if found.target:
        for key in ("family", "architecture", "weights", "tokenizer"):
            lines[f"target {key}"] = getattr(found.target, key)
    return lines | {f"training {key}": value for key, value in found.training.items()}


def target_lines(target: TargetModel) -> dict[str, Any]:
    from dlite.checkpoint import TargetRecord

    record = TargetRecord.of(target)
    return {
        "kind": "target",
        "name": record.name,
        "parameters": f"{sum(p.numel() for p in target.model.parameters()):,}",
        "family": record.family,
        "layers": record.num_layers,
        "hidden size": record.hidden_size,
        "vocabulary": record.vocab_size,
        "longest sequence": record.max_position_embeddings,
        "end tokens": sorted(target.eos_ids),
        "chat template": "yes" if target.tokenizer.chat_template else "no",
        "architecture": record.architecture,
        "weights": record.weights,
        "tokenizer": record.tokenizer,
    }


def corpus_lines(folder: Path) -> dict[str, Any]:
    from dlite.retrieval.corpus import read_manifest

    manifest = read_manifest(folder)
    licences: dict[str, int] = {}
    for source in manifest.sources:
        name = source.licence or "not stated"
        licences[name] = licences.get(name, 0) + source.num_tokens
    return {
        "kind": f"static corpus, {manifest.format}",
        "folder": folder,
        "documents": f"{len(manifest.sources):,}",
        "tokens": f"{manifest.num_tokens:,}",
        "tokenizer": manifest.tokenizer,
        "sha256": manifest.sha256,
        **{f"licence {name}": f"{tokens:,} tokens" for name, tokens in sorted(licences.items())},
        **{f"source {s.source}": f"{s.num_tokens:,} tokens" for s in manifest.sources},
    }


def environment_lines() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    import dlite
    from dlite import vllm_plugin

    lines = {"dlite": dlite.__version__}
    lines |= {package: version(package) for package in ("torch", "transformers")}
    lines["vllm"] = vllm_plugin.vllm_version() or "not installed"
    lines["vllm plugin"] = vllm_plugin.status()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**lines, "gpu": gpu}


def run_line(result: DecodeResult, kind: str) -> str:
    from dlite.types import tokens_per_step

    (completion,) = result.completions
    seconds, count = result.times.total_seconds, len(completion.tokens)
    parts = [
        f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s)",
        f"drafter {kind}",
    ]
    if completion.rounds:
        parts.append(f"tau {tokens_per_step(completion.rounds):.2f}")
    if drafted := sum(r.drafted for r in completion.rounds):
        accepted = sum(r.accepted for r in completion.rounds)
        parts.append(f"acceptance {accepted / drafted:.1%} of {drafted} drafted tokens")
    return "; ".join([*parts, f"finished by {completion.finish_reason}"])
