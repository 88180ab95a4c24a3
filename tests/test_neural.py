"""DLite behind the Drafter seam: its randomness, its clipping, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import TINY_DRAFT

from dlite.decode import decode
from dlite.drafters.neural import NeuralDrafter
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel
from dlite.types import Request, Sampling, View


@pytest.fixture(scope="module")
def model(tiny_target: TargetModel) -> DraftModel:
    torch.manual_seed(0)
    return DraftModel(DraftConfig(**TINY_DRAFT, num_hidden_layers=1)).bind(tiny_target)


def propose(model: DraftModel, sampling: Sampling, max_draft: int = 7) -> list[int]:
    """The draft of one call, from its start to its end."""
    drafter = NeuralDrafter(model)
    request = Request("same id", [5, 6, 7], 20, sampling=sampling)
    taps = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    drafter.start(request)
    (draft,) = drafter.propose([View(request, [5, 6, 7], max_draft, taps)])
    drafter.finish(request)
    assert (draft.probs_KV is None) == sampling.greedy
    return draft.tokens


def test_unseeded_calls_of_one_id_draw_new_drafts(model: DraftModel) -> None:
    """A fixed draft is not drawn from q: over repeated calls sampling would not follow p."""
    assert len({tuple(propose(model, Sampling(1.0))) for _ in range(8)}) > 1


def test_a_seed_repeats_its_draft_and_another_does_not(model: DraftModel) -> None:
    one, again, other = (propose(model, Sampling(1.0, seed=s)) for s in (1, 1, 2))
    assert one == again != other


def test_a_draft_is_no_longer_than_of_use(model: DraftModel) -> None:
    assert [len(propose(model, Sampling(), n)) for n in (0, 1, 3, 7)] == [0, 1, 3, 7]


def test_a_history_context_is_refused(tiny_target: TargetModel, model: DraftModel) -> None:
    teacher = DraftModel(replace(model.config, context="taps+history")).bind(tiny_target)
    with pytest.raises(ValueError, match="draft with a context='taps' model"):
        NeuralDrafter(teacher)


def test_unseeded_sampling_follows_the_target(tiny_target: TargetModel, model: DraftModel) -> None:
    """The first two tokens of 3,000 calls, the second from verified drafts, against the target's
    own probabilities."""
    prompt, sampling = [5, 6, 7, 8], Sampling(1.0, top_k=2)
    requests = [Request(str(i), prompt, 3, sampling=sampling) for i in range(3000)]
    drafter = NeuralDrafter(model)
    done = decode(tiny_target, requests, drafter, num_draft=2, batch_size=100).completions
    counts: dict[tuple[int, int], int] = {}
    for completion in done:
        if len(completion.tokens) >= 2:
            pair = (completion.tokens[0], completion.tokens[1])
            counts[pair] = counts.get(pair, 0) + 1
    expected: dict[tuple[int, int], float] = {}
    for first, p_first in top2(tiny_target, prompt):
        for second, p_second in top2(tiny_target, [*prompt, first]):
            expected[first, second] = p_first * p_second * len(requests)
    assert counts.keys() <= expected.keys()
    chi2 = sum((counts.get(pair, 0) - e) ** 2 / e for pair, e in expected.items() if e >= 5)
    assert chi2 < 16.3  # p = 0.001 at 3 degrees of freedom


def top2(target: TargetModel, ids: list[int]) -> list[tuple[int, float]]:
    """The two tokens that top_k=2 leaves behind `ids`, and their probabilities."""
    logits_V = target.logits(target.capture([ids], (3,))[0][-1, 0])
    values, tokens = logits_V.topk(2)
    return list(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))
