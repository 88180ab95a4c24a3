"""DFlash and DSpark in the decoding loop: the state kept per position against none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TINY_DRAFT
from oracle import OracleDrafter, requests
from torch import Tensor

from dlite.decode import DecodeResult, decode
from dlite.drafters.history import HistoryDrafter, drafter_of
from dlite.drafters.neural import NeuralDrafter
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks, History
from dlite.target import TargetModel
from dlite.types import Draft, Request, Sampling, SessionKey, Verdict, View

HISTORY: dict[str, Any] = {"context": "history", "composition": "feature", "history_window": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "dflash": {**HISTORY, "head": "none", "qk_norm": True, "mask_token_id": 511},
    "dspark": {**HISTORY, "head": "markov", "first_predictor": "anchor"},
    "windowed": {**HISTORY, "head": "none", "history_window": 6},
    "sinks": {**HISTORY, "head": "none", "history_window": 3, "history_sinks": 4},
    "pruned": {**HISTORY, "head": "markov", "draft_vocab_size": 504},
}


def build(target: TargetModel, shape: str) -> DraftModel:
    torch.manual_seed(0)
    model = DraftModel(DraftConfig(**TINY_DRAFT, num_hidden_layers=2, **SHAPES[shape]))
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    if model.config.pruned:
        kept_V = torch.arange(512) >= 8
        model.set_vocabulary(torch.full((504,), 8), kept_V)
    return model.bind(target)


def from_scratch(target: TargetModel, model: DraftModel, view: View) -> Tensor:
    """The slow and obvious way: block states [K, D] from the target's states of all tokens before
    the anchor."""
    tokens = list(view.tokens)
    (states_SLD,) = target.capture([tokens[:-1]], model.config.tap_ids)
    history = History(states_SLD, torch.tensor([len(tokens) - 1]), torch.tensor([0]))
    with torch.no_grad():
        return model.hidden(Blocks(torch.tensor(tokens[-1:]), states_SLD[-1:], history))[0]


class Compared(OracleDrafter):
    """Holds every block's states against those from scratch; drafts true and wrong tokens in their
    place, so that each row advances by another count."""

    def __init__(self, model: DraftModel, target: TargetModel, answers: dict) -> None:
        super().__init__(answers, model.config.tap_ids)
        self.inner, self.target = HistoryDrafter(model), target
        self.num_compared = 0
        model.decide = self.record  # pyright: ignore

    def record(self, h_AKD: Tensor, *args: Any) -> Any:
        self.h_AKD = h_AKD
        return DraftModel.decide(self.inner.model, h_AKD, *args)

    def start(self, request: Request) -> None:
        super().start(request)
        self.inner.start(request)

    def read(self, *args: Any) -> None:
        self.inner.read(*args)

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = self.inner.propose(views)
        wanted = [view for view in views if view.max_draft]
        for view, h_KD in zip(wanted, self.h_AKD if wanted else (), strict=True):
            expected_KD = from_scratch(self.target, self.inner.model, view)
            torch.testing.assert_close(h_KD, expected_KD, rtol=1e-4, atol=1e-4)
            self.num_compared += 1
        assert [len(draft.tokens) for draft in drafts] == [min(v.max_draft, 7) for v in views]
        return super().propose(views)

    def finish(self, request: Request) -> None:
        super().finish(request)
        self.inner.finish(request)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kept_history_drafts_other_tokens_than_the_whole_one(
    tiny_target: TargetModel, answers: dict[str, list[int]], shape: str
) -> None:
    """Rows come, advance by their own counts, and leave holes that others move into."""
    drafter = Compared(build(tiny_target, shape), tiny_target, answers)
    decode(tiny_target, requests(), drafter, batch_size=3)
    assert drafter.num_compared > 20
    assert drafter.inner._ids == [] == drafter.inner._cache.lengths_B


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_with_a_history_is_not_plain_decoding_s(
    tiny_target: TargetModel, plain_result: DecodeResult, shape: str
) -> None:
    drafter = drafter_of(build(tiny_target, shape))
    done = decode(tiny_target, requests(), drafter, batch_size=3).completions
    assert [c.tokens for c in done] == [c.tokens for c in plain_result.completions]
    assert sum(r.drafted for c in done for r in c.rounds) > 100


def test_sampled_requests_beside_greedy_ones_take_each_other_s_rows(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    """Sampled rows draw from their own q; greedy rows stay what they are."""
    mixed = requests()
    for request in mixed[::2]:
        request.sampling = Sampling(1.0, seed=3)
    drafter = drafter_of(build(tiny_target, "dspark"))
    done = decode(tiny_target, mixed, drafter, batch_size=4).completions
    assert [c.tokens for c in done[1::2]] == [answers[r.id] for r in mixed[1::2]]
    again = decode(tiny_target, mixed, drafter, batch_size=4).completions
    assert [c.tokens for c in again] == [c.tokens for c in done]


def test_a_subset_of_the_running_requests_is_given_another_s_draft(
    tiny_target: TargetModel,
) -> None:
    compared = Compared(build(tiny_target, "dflash"), tiny_target, {})
    drafter = compared.inner
    two = [Request(name, [5, 6, 7, n], 9) for name, n in (("a", 8), ("b", 9))]
    states = tiny_target.capture([r.prompt for r in two], drafter.tap_ids)
    for request in two:
        drafter.start(request)
    drafter.read(two, torch.stack(states), [4, 4])
    views = [View(request, [*request.prompt, 11], 7) for request in two]
    expected = [from_scratch(tiny_target, drafter.model, view) for view in views]
    assert (expected[0] - expected[1]).abs().max() > 0.01
    drafter.propose(views[1:])
    torch.testing.assert_close(compared.h_AKD[0], expected[1], rtol=1e-4, atol=1e-4)


def test_an_interrupt_before_the_first_states_leaves_a_row_behind(
    tiny_target: TargetModel,
) -> None:
    drafter = HistoryDrafter(build(tiny_target, "dflash"))
    request = Request("a", [5], 9, sampling=Sampling(1.0))
    drafter.start(request)
    drafter.finish(request)
    drafter.observe(request, Draft(), Verdict(0, 1))
    drafter.close(SessionKey("t", "s"))
    assert drafter.propose([View(request, [5], 0)]) == [Draft(source="history")]


def test_a_context_that_the_drafter_does_not_keep_is_refused(tiny_target: TargetModel) -> None:
    taps = DraftModel(DraftConfig(**TINY_DRAFT, num_hidden_layers=1)).bind(tiny_target)
    assert isinstance(drafter_of(taps), NeuralDrafter)
    with pytest.raises(ValueError, match="draft with NeuralDrafter"):
        HistoryDrafter(taps)
    teacher = DraftModel(DraftConfig(**TINY_DRAFT, num_hidden_layers=1, context="taps+history"))
    with pytest.raises(ValueError, match="draft with a context='taps' model"):
        drafter_of(teacher)
