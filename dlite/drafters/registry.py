"""Drafters by name: `build(name, options)`. Nothing heavy is imported before one is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlite.drafters.base import Drafter
    from dlite.drafters.memory import Memory, MemoryOptions
    from dlite.target import TargetModel
    from dlite.tokens import TokenBytes

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Resources:
    """What drafters are built from beside their options; each may be missing."""

    target: TargetModel | None
    tokenizer: Any

    @cached_property
    def table(self) -> TokenBytes | None:
        """None without a tokenizer, and for one whose tokens can't be read as bytes: blocks are
        then unknown."""
        from dlite.tokens import token_bytes

        if self.tokenizer is None:
            return None
        try:
            return token_bytes(self.tokenizer)
        except ValueError:
            return None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def corpus(self, folder: str | None, engine: str = "automaton") -> Any:
        from pathlib import Path

        from dlite.fingerprint import tokenizer_fingerprint
        from dlite.retrieval import corpus

        if folder is None:
            return None
        own = tokenizer_fingerprint(self.tokenizer) if self.tokenizer is not None else None
        load = corpus.load_tree if engine == "arctic" else corpus.load
        return load(Path(folder), tokenizer=own)

    def memory(self, options: MemoryOptions, folder: str | None = None) -> Memory:
        from dlite.drafters.memory import Memory

        return Memory(
            options,
            encode=self.encode if self.tokenizer is not None else None,
            table=self.table,
            corpus=self.corpus(folder, options.engine),
        )


def _ngram(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.ngram import NgramDrafter, NgramOptions

    chosen = from_mapping(NgramOptions, options)
    return NgramDrafter(max_n=chosen.max_n, min_n=chosen.min_n)


def _dlite(options: Options, resources: Resources) -> Drafter:
    from dlite import checkpoint
    from dlite.config import from_mapping
    from dlite.drafters.neural import NeuralDrafter, NeuralOptions

    chosen = from_mapping(NeuralOptions, options)
    if resources.target is None:
        raise ValueError("drafter 'dlite' reads its target's states; build it with the target")
    return NeuralDrafter(checkpoint.load(chosen.draft, resources.target, strict=chosen.strict))


def _sam(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.copying import CopyDrafter, CopyOptions

    chosen = from_mapping(CopyOptions, options)
    return CopyDrafter("sam", resources.memory(chosen), chosen)


def _suffix(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.copying import CopyDrafter, SuffixOptions

    chosen = from_mapping(SuffixOptions, options)
    return CopyDrafter("suffix", resources.memory(chosen), chosen)


def _agentspec(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.agentspec import AgentSpecDrafter, AgentSpecOptions

    chosen = from_mapping(AgentSpecOptions, options)
    if chosen.variant in ("R", "N"):
        resources = Resources(resources.target, None)  # no table: structure is not read
    return AgentSpecDrafter([resources.memory(one) for one in chosen.searched()], chosen)


def _agspec(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions

    chosen = from_mapping(AgSpecOptions, options)
    return AgSpecDrafter(resources.memory(chosen, chosen.corpus), chosen)


def _rest(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.rest import RestDrafter, RestOptions

    chosen = from_mapping(RestOptions, options)
    return RestDrafter(resources.corpus(chosen.corpus), chosen)


def _survival(options: Options, resources: Resources) -> Drafter:
    from dlite.config import from_mapping
    from dlite.drafters.survival import SurvivalDrafter, SurvivalOptions
    from dlite.survival import Prior, shipped_prior

    chosen = from_mapping(SurvivalOptions, options)
    prior = shipped_prior() if chosen.priors == "shipped" else Prior.read(chosen.priors)
    return SurvivalDrafter(resources.memory(chosen, chosen.corpus), chosen, prior)


def _hybrid(options: Options, resources: Resources) -> Drafter:
    """The survival policy and, with `draft`, a draft model, under a planner."""
    from dlite import checkpoint
    from dlite.config import from_mapping
    from dlite.costs import CostTable, measure
    from dlite.drafters.neural import NeuralDrafter
    from dlite.hybrid import Hybrid, HybridOptions
    from dlite.planner import Planner

    chosen = from_mapping(HybridOptions, options)
    target, model = resources.target, None
    if chosen.draft is not None:
        if target is None:
            raise ValueError("a draft model reads its target's states; build it with the target")
        model = checkpoint.load(chosen.draft, target, strict=chosen.strict)
    if chosen.costs is not None:
        costs = CostTable.read(chosen.costs)
    elif target is not None:
        costs = measure(target, chosen.batch_size, chosen.num_draft, model)
    else:
        raise ValueError("what a step costs is not known; build with the target, or give costs")
    kept = {key: value for key, value in options.items() if key in CORPUS_KEYS}
    drafters = [_survival(kept, resources)]
    if model is not None:
        drafters.append(NeuralDrafter(model, argmax=True))
    return Hybrid(drafters, Planner(costs))


CORPUS_KEYS = ("corpus", "priors")
DRAFTERS: dict[str, Callable[[Options, Resources], Drafter]] = {
    "dlite": _dlite,
    "ngram": _ngram,
    "sam": _sam,
    "suffix": _suffix,
    "agentspec": _agentspec,
    "agspec": _agspec,
    "rest": _rest,
    "survival": _survival,
    "hybrid": _hybrid,
}


def check_name(name: str) -> None:
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose from {', '.join(DRAFTERS)}")


def build(
    name: str,
    options: Options | None = None,
    *,
    target: TargetModel | None = None,
    tokenizer: Any = None,
) -> Drafter:
    """The drafter `name`. `tokenizer` (default: the target's) is needed to index files, to follow
    blocks, and to check that a static corpus fits.

    Raises ValueError for an unknown name, option or value, and where something needed is missing.
    """
    check_name(name)
    if tokenizer is None and target is not None:
        tokenizer = target.tokenizer
    return DRAFTERS[name](options or {}, Resources(target, tokenizer))
