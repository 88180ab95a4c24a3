"""The draft model: what sees what, and that fast forms equal slow ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlite.model.config import DraftConfig, default_tap_ids
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks, History
from dlite.model.vocab import vocab_maps
from dlite.types import Sampling

V, D, S = 50, 32, 40
SIZES: dict[str, Any] = {
    "tap_ids": (0, 1, 3),
    "num_target_layers": 4,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not D / heads
    "vocab_size": V,
    "num_hidden_layers": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dlite": {},
    "dlite-feature": {"composition": "feature"},
    "dlite-tied": {"head": "tied"},
    "teacher": {"context": "taps+history", "history_window": 5, "qk_norm": True},
    "teacher-all": {"context": "taps+history", "history_window": 0, "head": "tied"},
    "dflash": {"context": "history", "composition": "feature", "head": "none"},
    "dspark": {
        "context": "history",
        "composition": "feature",
        "head": "markov",
        "first_predictor": "anchor",
        "history_window": 6,
    },
    "dspark-sinks": {
        "context": "history",
        "composition": "feature",
        "head": "markov",
        "first_predictor": "anchor",
        "history_window": 3,
        "history_sinks": 4,
    },
}


def build(**changes: Any) -> DraftModel:
    torch.manual_seed(0)
    embedding = nn.Embedding(V, D).requires_grad_(False)
    target: Any = SimpleNamespace(
        embed=embedding, head_weight_VD=torch.randn(V, D), num_token_ids=changes.pop("real", V)
    )
    model = DraftModel(DraftConfig(**{**SIZES, **changes}))
    for parameter in model.parameters():  # nothing may hide behind a zero start
        nn.init.normal_(parameter, std=0.3)
    return model.bind(target).requires_grad_(False)


def inputs(model: DraftModel) -> tuple[Blocks, Tensor]:
    generator = torch.Generator().manual_seed(1)
    history = None
    if model.config.context != "taps":
        states = torch.randn(S, 3, D, generator=generator)
        row = torch.tensor([5, 9, 21, 25, 39])
        history = History(states, row, torch.tensor([0, 0, 20, 20, 20]))
    anchor_A = torch.randint(0, V, (5,), generator=generator)
    prev_AK = torch.randint(0, V, (5, 7), generator=generator)
    prev_AK[:, 0] = anchor_A
    return Blocks(anchor_A, torch.randn(5, 3, D, generator=generator), history), prev_AK


variants = pytest.mark.parametrize("name", VARIANTS)


def test_tap_ids_follow_the_published_spread() -> None:
    assert default_tap_ids(36, 12) == (0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35)
    assert default_tap_ids(36, 14)[:4] == (0, 1, 4, 7) and len(default_tap_ids(36, 14)) == 14
    with pytest.raises(ValueError, match="num_taps is 40"):
        default_tap_ids(36, 40)


@variants
def test_stepped_head_equals_unrolled_head(name: str) -> None:
    model = build(**VARIANTS[name])
    blocks, prev_AK = inputs(model)
    hidden, head = model.hidden(blocks), model.sequential_head
    state, stepped = head.initial(hidden), []
    for k in range(7):
        features, state = head.step(state, hidden[:, k], prev_AK[:, k], model.norm)
        stepped.append(features)
    torch.testing.assert_close(torch.stack(stepped, 1), model(blocks, prev_AK))


@pytest.mark.parametrize("name", ["teacher", "teacher-all", "dflash", "dspark", "dspark-sinks"])
def test_flex_form_equals_dense_form(name: str) -> None:
    model = build(**VARIANTS[name])
    blocks, prev_AK = inputs(model)
    dense, packed = (model(blocks, prev_AK, form) for form in ("dense", "flex"))
    torch.testing.assert_close(dense, packed, rtol=1e-5, atol=1e-5)


@variants
def test_an_anchor_is_independent_of_the_others_in_the_batch(name: str) -> None:
    model = build(**VARIANTS[name])
    blocks, prev_AK = inputs(model)
    together = model(blocks, prev_AK)
    for a in range(5):
        history = blocks.history
        if history is not None:
            history = replace(
                history, row_A=history.row_A[a : a + 1], start_A=history.start_A[a : a + 1]
            )
        alone = Blocks(blocks.anchor_A[a : a + 1], blocks.taps_ALD[a : a + 1], history)
        torch.testing.assert_close(model(alone, prev_AK[a : a + 1])[0], together[a])


@variants
def test_block_attention_sees_later_placeholders(name: str) -> None:
    """N9: causal attention inside the block would leave the first position unmoved."""
    model = build(**VARIANTS[name])
    blocks, _ = inputs(model)
    before = model.hidden(blocks)
    start = model._block

    def perturbed(anchor_A: Tensor) -> Tensor:
        x_AQD = start(anchor_A).clone()
        x_AQD[:, -1] += 1.0
        return x_AQD

    model._block = perturbed  # type: ignore[method-assign]
    assert (model.hidden(blocks)[:, 0] - before[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "first", "last"), [("teacher", 20, 23), ("dspark", 20, 24)])
def test_history_window_ends_before_the_anchor_and_starts_inside_the_sample(
    name: str, first: int, last: int
) -> None:
    """N8, N10: the mask blocks for real. The anchor at row 25 of a sample that starts at row 20,
    W >= 5, sees rows 20 .. a-2 (a-1 is in the slots), or 20 .. a-1 without slots."""
    model = build(**VARIANTS[name])
    blocks, _ = inputs(model)
    assert blocks.history is not None
    before = model.hidden(blocks)[3]
    for row in range(S):
        states = blocks.history.states_SCD.clone()
        states[row] += 1.0
        moved = model.hidden(replace(blocks, history=replace(blocks.history, states_SCD=states)))[3]
        assert bool((moved - before).abs().max() > 1e-6) == (first <= row <= last), row


@pytest.mark.parametrize(
    ("anchor", "seen"),
    [
        (1, {0, 1, 2, 3, 6, 7, 8}),  # row 9 of the sample that starts at 0
        (3, {20, 21, 22, 23, 24}),  # row 25: its window and sinks share rows 22, 23
        (4, {20, 21, 22, 23, 36, 37, 38}),
    ],
)
@pytest.mark.parametrize("form", ["dense", "flex"])
def test_sinks_are_another_sample_s_or_outside_the_mask(
    form: str, anchor: int, seen: set[int]
) -> None:
    model = build(**VARIANTS["dspark-sinks"])
    blocks, _ = inputs(model)
    assert blocks.history is not None
    before = model.hidden(blocks, form)[anchor]
    moving = set()
    for row in range(S):
        states = blocks.history.states_SCD.clone()
        states[row] += 1.0
        history = replace(blocks.history, states_SCD=states)
        moved = model.hidden(replace(blocks, history=history), form)[anchor]
        moving |= {row} if bool((moved - before).abs().max() > 1e-6) else set()
    assert moving == seen


@pytest.mark.parametrize("name", ["teacher", "dspark", "dspark-sinks"])
def test_rebasing_positions_changes_nothing_where_rope_is_relative(name: str) -> None:
    model = build(**VARIANTS[name])
    blocks, _ = inputs(model)
    history = blocks.history
    assert history is not None
    padding = torch.randn(1000, 3, D)
    moved = History(
        torch.cat([padding, history.states_SCD]), history.row_A + 1000, history.start_A + 1000
    )
    torch.testing.assert_close(
        model.hidden(replace(blocks, history=moved)), model.hidden(blocks), rtol=1e-4, atol=1e-4
    )


def test_full_rank_svd_start_reproduces_the_target_head() -> None:
    model = build(rank=D)
    model.sequential_head.init_from_svd(model._head_VD)  # type: ignore[operator]
    h_D = torch.randn(4, D)
    u_R = h_D @ model.sequential_head.state_hidden_mlp.weight[:, D:].T  # type: ignore[union-attr]
    torch.testing.assert_close(
        u_R @ model.vocab_weight().T, h_D @ model._head_VD.T, rtol=1e-3, atol=1e-3
    )


def test_pruned_drafts_stay_inside_the_draft_vocabulary_and_probs_are_scattered() -> None:
    counts = torch.zeros(V)
    counts[[3, 7, 20, 41]] = 5
    model = build(draft_vocab_size=6)
    model.set_vocabulary(*vocab_maps(counts, 6, always=[2]))
    embed, head = model._embed, torch.randn(V, D)
    bound: Any = SimpleNamespace(embed=embed, head_weight_VD=head, num_token_ids=V)
    model.bind(bound)
    blocks, _ = inputs(model)
    kept = set(model.draft_ids().tolist())
    assert {2, 3, 7, 20, 41} < kept and len(kept) == 6
    tokens_AK, probs = model.draft(blocks, 7, [Sampling(1.0)] * 5, torch.rand(5, 7))
    assert set(tokens_AK.flatten().tolist()) <= kept
    assert probs[0] is not None and probs[0].shape == (7, V)
    torch.testing.assert_close(probs[0].sum(-1), torch.ones(7))
    assert set(probs[0].sum(0).nonzero().squeeze(-1).tolist()) <= kept


def test_padding_rows_of_the_lm_head_are_never_drafted() -> None:
    """V3: only 10 of the 50 rows have a token."""
    for changes in ({}, {"head": "tied"}):
        model = build(**changes, real=10)
        tokens_AK, probs = model.draft(inputs(model)[0], 7, [Sampling(1.0)] * 5, torch.rand(5, 7))
        assert int(tokens_AK.max()) < 10
        assert probs[0] is not None and float(probs[0][:, 10:].sum()) == 0


def test_more_drafts_than_trained_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="8 draft tokens asked of a draft model trained for 7"):
        model.draft(inputs(model)[0], 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tap_ids": ()}, "tap_ids is empty"),
        ({"tap_ids": (0, 4)}, "must be distinct layers of 0 .. 3"),
        ({"head": "magic"}, "head is 'magic'; choose one of"),
        ({"context": "history"}, "needs composition 'feature'"),
        ({"history_sinks": -1}, "history_sinks -1; give counts"),
        ({"draft_vocab_size": V + 1}, "exceeds the target's"),
    ],
)
def test_bad_configurations_name_value_and_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftConfig(**{**SIZES, **changes})


def test_a_config_without_tap_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="no tap_ids"):
        DraftConfig.from_dict({k: v for k, v in SIZES.items() if k != "tap_ids"})


def test_five_layers_are_finite_at_the_first_step() -> None:
    """N5: two and five layers as one."""
    for num_layers in (1, 2, 5):
        model = build(num_hidden_layers=num_layers)
        blocks, prev_AK = inputs(model)
        assert model(blocks, prev_AK).isfinite().all()
