"""Sampling through vLLM's rejection sampler: tokens 2 and 3 come from verified drafts, and their
joint distribution with the first is the target's own. 20,000 requests each, greedy ones among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_DRAFT, save_tiny_llama

from dlite import checkpoint
from dlite.costs import CostTable
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.sampling import warp
from dlite.target import TargetModel
from dlite.types import Sampling

pytest.importorskip("vllm", reason="vLLM is not installed here: bash scripts/setup.sh vllm")

from vllm_engine import Engine, engine

# So few tokens that drafts of an untrained model are accepted now and then.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 24,
}
DRAFT = {
    **TINY_DRAFT,
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 24,
}
NUM_REQUESTS = 20_000
PROMPT = list(range(2, 24))  # every token, so that ngram always drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tmp_path_factory.mktemp("sampled") / "target"
    return TargetModel.load(str(save_tiny_llama(folder, **SIZES, initializer_range=0.1)))


@pytest.fixture(scope="module")
def served(target: TargetModel) -> Iterator[Engine]:
    torch.manual_seed(1)
    draft = Path(target.name).with_name("draft")
    model = DraftModel(DraftConfig(**DRAFT)).bind(target)
    checkpoint.save(model, draft, target=target, training={})
    with engine(
        target.name,
        ["dlite", "ngram", "hybrid"],
        draft,
        {"hybrid": {"drafters": ["sam"]}},
        max_model_len=64,
        max_num_seqs=128,
    ) as it:
        # A planner that always drafts: verifying costs nothing.
        it.runner.step_times = None
        it.runner.drafter.planner.costs = CostTable(
            batch_sizes=[1], num_tokens=[1, 4096], seconds=[[1.0, 1.001]]
        )
        yield it


def distribution(target: TargetModel, prompt: list[int], sampling: Sampling) -> dict[Any, float]:
    """Probabilities of all continuations of three tokens that are likelier than 1e-5."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        tails = list(found)
        states = target.capture([[*prompt, *tail] for tail in tails], (target.num_layers - 1,))
        p_NV = warp(target.logits(torch.stack([s[-1, 0] for s in states])), sampling)
        longer = {}
        for tail, p_V in zip(tails, p_NV, strict=True):
            if tail and tail[-1] in target.eos_ids:
                longer[tail] = found[tail]
                continue
            for token in (p_V > 0).nonzero().flatten().tolist():
                probability = found[tail] * float(p_V[token])
                if probability > 1e-6:
                    longer[(*tail, token)] = probability
        found = longer
    return found


def p_value(expected: dict[Any, float], outputs: list[list[int]]) -> float:
    """Of Pearson's chi-square, cells pooled to at least 5 expected."""
    counts, n = Counter(map(tuple, outputs)), len(outputs)
    cells = [(counts[key], n * p) for key, p in expected.items() if n * p >= 5]
    rest = n - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((n - sum(o for o, _ in cells), rest))
    statistic = sum((observed - e) ** 2 / e for observed, e in cells)
    free = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    assert len(cells) > 8
    return float(torch.special.gammaincc(free, half))


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ("dlite", {"top_k": 4}),
        ("dlite", {"top_p": 0.6}),
        ("dlite", {"top_k": 6, "top_p": 0.7}),
        ("dlite", {"top_k": 4, "seeded": True}),
        ("ngram", {"top_k": 4}),
        ("hybrid", {"top_k": 4}),
        ("hybrid", {"top_p": 0.6, "seeded": True}),
    ],
)
def test_served_tokens_follow_the_target(
    served: Engine, target: TargetModel, drafter: str, sampling: dict[str, Any]
) -> None:
    """Fails without patches._expand_on_cpu, without draft probabilities for drawn drafts, and with
    drafts that are no draws."""
    from vllm import SamplingParams

    sampling, number = dict(sampling), NUM_REQUESTS
    seeded = sampling.pop("seeded", False)
    asked = [
        SamplingParams(
            temperature=0.8,
            max_tokens=4,  # so that two drafts are verified behind the first token
            seed=i if seeded else None,
            extra_args={"dlite_drafter": drafter},
            **sampling,
        )
        for i in range(number)
    ]
    for i in range(0, number, 7):  # greedy ones among them
        asked[i] = SamplingParams(temperature=0.0, max_tokens=4)
    before = served.drafted_and_accepted()
    done = served.llm.generate([{"prompt_token_ids": PROMPT}] * number, asked, use_tqdm=False)
    drafted, accepted = (b - a for a, b in zip(before, served.drafted_and_accepted(), strict=True))
    assert accepted > number / 100 and drafted - accepted > number / 100
    outputs = [list(o.outputs[0].token_ids)[:3] for i, o in enumerate(done) if i % 7]
    expected = distribution(target, PROMPT, Sampling(0.8, **sampling))
    assert math.isclose(sum(expected.values()), 1.0, abs_tol=0.01)
    assert p_value(expected, outputs) > 1e-3
    assert len({tuple(o.outputs[0].token_ids) for o in done[::7]}) == 1


def test_a_seed_repeats_its_answer(served: Engine) -> None:
    from vllm import SamplingParams

    asked = [SamplingParams(temperature=1.0, max_tokens=12, seed=5) for _ in range(3)]
    prompts = [{"prompt_token_ids": PROMPT}] * 3
    done = [served.llm.generate(prompts[:1], one, use_tqdm=False) for one in asked]
    assert len({tuple(out[0].outputs[0].token_ids) for out in done}) == 1
