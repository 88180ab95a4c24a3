"""Which position is held against which label: written out by hand on a sample of known numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_tiny_llama
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel
from train.batches import Batch, assemble, order, step_samples
from train.config import ModelConfig
from train.data import Sample
from train.stages import build_model, draft_config

V = 200


class NumberedStates:
    """State of layer l at position t of a sample is the number 1000 * l + t."""

    layer_ids: tuple[int, ...] = (0, 1, 2, 3)

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        layer = torch.tensor(self.layer_ids, dtype=torch.float32)
        return [
            (1000 * layer[None, :, None] + torch.arange(len(s.input_ids))[:, None, None]).expand(
                -1, -1, 2
            )
            for s in samples
        ]

    def log_z(self, samples: Sequence[Sample]) -> None:
        return None


def config(**changes: Any) -> DraftConfig:
    sizes: dict[str, Any] = {
        "tap_ids": (0, 2, 3),
        "num_target_layers": 4,
        "hidden_size": 2,
        "intermediate_size": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "vocab_size": V,
        "num_draft_tokens": 4,
    }
    return DraftConfig(**{**sizes, **changes})


def batch(samples: list[Sample], anchors: list[list[int]], *, with_history: bool = False) -> Batch:
    draft_ids = torch.arange(V)
    return assemble(
        samples, anchors, NumberedStates(), config(), draft_ids, with_history=with_history
    )


def turn(first: int, last: int, length: int, base: int = 0) -> Sample:
    mask = [first <= t <= last for t in range(length)]
    return Sample(f"{base}", [base + t for t in range(length)], mask)


def test_slot_i_predicts_the_token_i_behind_the_anchor() -> None:
    """N10, N11: taps at a-1, the anchor's token first, label a+i, target row a+i-1, previous token
    a+i-1; the first slot is trained like the others."""
    made = batch([turn(8, 39, 50)], [[10]])
    assert made.blocks.taps_ALD[0, :, 0].tolist() == [9, 2009, 3009]
    assert made.blocks.anchor_A.tolist() == [10]
    assert made.prev_AK.tolist() == [[10, 11, 12, 13]]
    assert made.labels.label_AK.tolist() == [[11, 12, 13, 14]]
    assert made.labels.state_AKD[0, :, 0].tolist() == [3010, 3011, 3012, 3013]
    weights = made.labels.decay(gamma=4.0)[0]
    torch.testing.assert_close(weights, torch.exp(-torch.arange(4) / 4))


def test_mask_follows_the_predicted_token() -> None:
    """N12: a turn at 8 .. 39, anchor 37, block 4: labels 38 and 39 are inside, 40 and 41 are not;
    supervision that starts again behind the gap does not count."""
    sample = turn(8, 39, 50)
    again = Sample(
        sample.id, sample.input_ids, [on or t == 41 for t, on in enumerate(sample.loss_mask)]
    )
    for made in (batch([sample], [[37]]), batch([again], [[37]])):
        assert made.labels.valid_AK.tolist() == [[True, True, False, False]]


def test_a_block_past_the_end_of_a_sample_is_cut() -> None:
    made = batch([turn(8, 11, 12)], [[9]])
    assert made.labels.valid_AK.tolist() == [[True, True, False, False]]


def test_packed_history_keeps_samples_apart() -> None:
    made = batch([turn(3, 9, 10), turn(4, 11, 12, base=100)], [[5], [6, 8]], with_history=True)
    history = made.history
    assert history is not None
    assert history.start_A.tolist() == [0, 10, 10]
    assert history.row_A.tolist() == [5, 16, 18]
    assert history.states_SCD.shape == (22, 3, 2)  # layers 0, n // 2 and n - 1
    assert history.states_SCD[16, :, 0].tolist() == [6, 2006, 3006]
    assert made.blocks.anchor_A.tolist() == [5, 106, 108]


class RandomStates(NumberedStates):
    """Of each token and layer, whatever stands before it."""

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        table_V4D = torch.randn(V, 4, 16, generator=torch.Generator().manual_seed(0))
        return [table_V4D[torch.tensor(s.input_ids)] for s in samples]


@pytest.mark.parametrize("context", ["taps", "taps+history"])
def test_a_draft_is_the_same_behind_1k_8k_and_32k_tokens(context: str) -> None:
    """L3: with the same states, a draft model knows no position; only a history's are relative."""
    sizes = {"hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "history_window": 8}
    draft = config(**sizes, context=context, rank=4, num_target_layers=4)
    torch.manual_seed(0)
    model = DraftModel(draft)
    head_VD = torch.randn(V, 16)
    bound = SimpleNamespace(embed=lambda ids: head_VD[ids], head_weight_VD=head_VD, num_token_ids=V)
    model.bind(bound)  # pyright: ignore[reportArgumentType]
    tail, features = [(7 * t) % V for t in range(40)], []
    for before in (0, 1024, 8192, 32768):
        ids = [0] * before + tail
        sample = Sample("s", ids, [t > before for t in range(len(ids))])
        made = assemble(
            [sample],
            [[before + 12, before + 30]],
            RandomStates(),
            draft,
            torch.arange(V),
            with_history=context != "taps",
        )
        blocks = replace(made.blocks, history=made.history)
        features.append(model(blocks, made.prev_AK))
    for long in features[1:]:
        torch.testing.assert_close(long, features[0], rtol=0, atol=1e-3 if made.history else 0)


def test_order_is_a_function_of_seed_and_epoch_and_an_epoch_holds_every_sample_once() -> None:
    samples = [turn(1, 4, 6, base=10 * i) for i in range(10)]
    seen = [s.id for step in range(4) for s in step_samples(samples, step, 3, seed=5)[0]]
    assert sorted(seen) == sorted(s.id for s in samples)
    assert order(10, 5, 0) == order(10, 5, 0) != order(10, 5, 1)
    assert step_samples(samples, 4, 3, seed=5)[1] == 1


def test_a_draft_has_its_targets_head_size_where_that_is_not_hidden_size_by_heads(
    tmp_path: Path,
) -> None:
    """F5: Qwen3's is not."""
    target = TargetModel.load(str(save_tiny_llama(tmp_path / "wide", head_dim=24)))
    draft = draft_config(target, ModelConfig(num_taps=3), [])
    assert draft.head_dim == 24 != draft.hidden_size // draft.num_attention_heads


@pytest.mark.parametrize("head", ["tied", "lowrank"])
def test_weights_stay_float32_over_a_bfloat16_target(tiny_folder: Any, head: str) -> None:
    """N20: small updates are lost in bfloat16 weights; the borrowed LM head keeps its own type."""
    target = TargetModel.load(str(tiny_folder), dtype="bfloat16")
    sample = Sample("a", list(range(3, 40)), [t > 5 for t in range(37)])
    draft = draft_config(target, ModelConfig(num_hidden_layers=1, num_taps=3, head=head), [sample])
    model = build_model(draft, target, torch.ones(target.vocab_size), "random", 0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    states = target.capture([sample.input_ids], (0, 2, 3))[0]
    made = assemble([sample], [[8]], _One(states), draft, torch.arange(512), with_history=False)
    tokens_AK, _ = model.draft(made.blocks)
    assert tokens_AK.shape == (1, 7)


class _One:
    layer_ids: tuple[int, ...] = (0, 2, 3)

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def get(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self.states]

    def log_z(self, samples: Sequence[Sample]) -> None:
        return None
