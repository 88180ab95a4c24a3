"""The one place where logits become probabilities, and probabilities a token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dlite.sampling import draw, warp
from dlite.types import Sampling


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.95, 1.0])
def test_warping_equals_hugging_faces(temperature: float, top_k: int, top_p: float) -> None:
    logits_NV = 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(6, 1, dtype=torch.long)
    wanted = TemperatureLogitsWarper(temperature)(ids, logits_NV)  # pyright: ignore
    if top_k:
        wanted = TopKLogitsWarper(top_k)(ids, wanted)  # pyright: ignore
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(ids, wanted)  # pyright: ignore
    found = warp(logits_NV, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, wanted.softmax(-1), atol=1e-6, rtol=1e-5)


def test_greedy_is_one_hot_on_the_first_of_equal_maxima() -> None:
    assert warp(torch.tensor([[1.0, 5.0, 5.0]]), Sampling()).tolist() == [[0.0, 1.0, 0.0]]


def test_top_k_keeps_every_token_tied_with_the_kth() -> None:
    probs_NV = warp(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), Sampling(1.0, top_k=2))
    assert (probs_NV > 0).tolist() == [[True, True, True, False]]


def test_half_precision_logits_are_raised_before_the_softmax() -> None:
    probs_NV = warp(torch.zeros(1, 3000, dtype=torch.bfloat16), Sampling(1.0))
    assert probs_NV.dtype == torch.float32
    assert abs(float(probs_NV.sum()) - 1) < 1e-5


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=9).filter(
        any
    ),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    probs_V = torch.tensor(weights)
    assert probs_V[draw(probs_V / probs_V.sum(), uniform)] > 0


def test_a_draw_falls_into_the_cell_of_its_token() -> None:
    probs_V = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    drawn = [draw(probs_V, u) for u in (0.0, 0.24, 0.25, 0.5, 0.74, 0.75, 0.99)]
    assert drawn == [0, 0, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(
    values: dict[str, float], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"{named}; give"):
        Sampling(**values)  # pyright: ignore
