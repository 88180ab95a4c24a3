"""Which rank takes what, and that packing changes no gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from padded_reference import LOSS, made_of, padded_loss

from dlite.target import TargetModel
from train.batches import assemble, step_samples
from train.config import LossConfig, ModelConfig, StageConfig
from train.data import Sample, anchors
from train.packing import deal
from train.stages import Stage, build_model, draft_config, t2draft
from train.states import LiveStates

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def samples_of(lengths: list[int]) -> list[Sample]:
    return [Sample(f"s{i}", [5] * n, [True] * n) for i, n in enumerate(lengths)]


@given(lengths, st.integers(1, 5), st.integers(0, 4), st.sampled_from([0, 20, 64]))
def test_every_sample_is_dealt_once_and_every_rank_runs_as_many_micro_batches(
    lengths: list[int], world: int, size: int, tokens: int
) -> None:
    """N23: with ranks that have nothing left, too."""
    samples = samples_of(lengths)
    shares = deal(samples, world, size=size, tokens=tokens)
    assert len(shares) == world and len({len(share) for share in shares}) == 1
    dealt = [s.id for share in shares for part in share for s in part]
    assert sorted(dealt) == sorted(s.id for s in samples)
    for part in (part for share in shares for part in share):
        if tokens:
            assert len(part) == 1 or sum(len(s.input_ids) for s in part) <= tokens
        elif size:
            assert len(part) <= size


def test_a_token_budget_loads_ranks_evenly() -> None:
    samples = samples_of([50, 10, 10, 10, 10, 10, 40, 20])
    shares = deal(samples, 2, tokens=200)
    loads = [sum(len(s.input_ids) for part in share for s in part) for share in shares]
    assert loads == [80, 80]


def test_one_process_without_a_budget_takes_the_samples_in_order() -> None:
    samples = samples_of([3, 9, 4, 5, 6])
    assert deal(samples, 1) == [[samples]]
    assert deal(samples, 1, size=2) == [[samples[:2], samples[2:4], samples[4:]]]


def test_two_nodes_of_two_read_disjoint_shards_that_are_the_epoch() -> None:
    samples = samples_of([1 + i % 7 for i in range(23)])
    seen = []
    for step in range(5):
        picked, epoch = step_samples(samples, step, 5, seed=3)
        assert epoch == 0
        seen += [s.id for share in deal(picked, 4, tokens=8) for part in share for s in part]
    assert sorted(seen) == sorted(s.id for s in samples)


@pytest.mark.parametrize("tokens", [0, 150])
def test_packed_and_chunked_equals_padded_and_eager(tiny_target: TargetModel, tokens: int) -> None:
    samples = made_of([40, 90, 25, 120, 61], 500)
    drawn = [anchors(s, 0, 0, 20) for s in samples]
    draft = draft_config(tiny_target, ModelConfig(num_hidden_layers=2, num_taps=3, rank=8), samples)
    grads = []
    for packed in (False, True):
        model = build_model(draft, tiny_target, torch.ones(512), "random", 0)
        if packed:
            stage = Stage(
                StageConfig("s", loss=LossConfig(ce=LOSS.ce, tv=LOSS.tv)),
                model,
                tiny_target,
                None,
                4.0,
            )
            states = LiveStates(tiny_target, tuple(sorted({*draft.tap_ids, 3})))
            by_id = {s.id: a for s, a in zip(samples, drawn, strict=True)}
            parts = [part for part in deal(samples, 1, tokens=tokens)[0] if part]
            batches = [
                assemble(
                    part,
                    [by_id[s.id] for s in part],
                    states,
                    draft,
                    t2draft(model),
                    with_history=False,
                )
                for part in parts
            ]
            weights = [b.labels.weights(4.0) for b in batches]
            totals = {name: sum(w[name] for w in weights) for name in weights[0]}
            for batch in batches:
                stage(batch, totals)[0].backward()
        else:
            padded_loss(model, tiny_target, samples, drawn, LOSS).backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
