"""Losslessness, proved by enumeration on a 5-token vocabulary."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dlite.decode import judge
from dlite.running import Row
from dlite.types import Draft, Request, Sampling
from dlite.verify import acceptance, verify, verify_greedy

V = 5
EXACT = 1e-12
Conditional = Callable[[tuple[int, ...]], Tensor]  # prefix -> float64 distribution [V]
Joint = dict[tuple[int, ...], float]


def conditional(seed: int, *, zero: tuple[int, ...] = ()) -> Conditional:
    """A random language model over V tokens; tokens in `zero` never occur."""

    @functools.cache
    def distribution(prefix: tuple[int, ...]) -> Tensor:
        number = sum((token + 1) * (V + 1) ** i for i, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(1000 * seed + number)
        logits_V = 2 * torch.randn(V, generator=generator, dtype=torch.float64)
        logits_V[list(zero)] = -torch.inf
        return logits_V.softmax(-1)

    return distribution


def joint(p: Conditional, length: int, prefix: tuple[int, ...] = ()) -> Joint:
    if len(prefix) == length:
        return {prefix: 1.0}
    result: Joint = {}
    for token, chance in enumerate(p(prefix).tolist()):
        for sequence, rest in joint(p, length, (*prefix, token)).items():
            result[sequence] = chance * rest
    return result


def rows(f: Conditional, draft: tuple[int, ...], count: int) -> Tensor:
    return torch.stack([f(draft[:k]) for k in range(count)])


def neural_drafts(q: Conditional, num_draft: int) -> Iterator[tuple[float, Draft]]:
    """Every draft that q can produce and its probability."""
    for tokens, chance in joint(q, num_draft).items():
        if chance > 0:
            yield chance, Draft(list(tokens), rows(q, tokens, num_draft))


def one_round(p_NV: Tensor, draft: Draft) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of a round and its probability, from `acceptance` alone."""
    accept_K, residual_NV = acceptance(p_NV, draft.tokens, draft.probs_KV)
    reach = 1.0
    for k in range(len(draft.tokens) + 1):
        stop = 1.0 - float(accept_K[k]) if k < len(draft.tokens) else 1.0
        for token, chance in enumerate(residual_NV[k].tolist()):
            yield reach * stop * chance, (*draft.tokens[:k], token)
        if k < len(draft.tokens):
            reach *= float(accept_K[k])


def speculative_joint(p: Conditional, drafts: Iterator[tuple[float, Draft]], length: int) -> Joint:
    """Distribution of the first `length` tokens when one round is followed by plain sampling."""
    result: Joint = defaultdict(float)
    for chance, draft in drafts:
        p_NV = rows(p, tuple(draft.tokens), len(draft.tokens) + 1)
        for weight, emitted in one_round(p_NV, draft):
            for sequence, rest in joint(p, length, emitted).items():
                result[sequence] += chance * weight * rest
    return result


def assert_same(found: Joint, wanted: Joint) -> None:
    assert found.keys() <= wanted.keys()
    for sequence, chance in wanted.items():
        assert abs(found.get(sequence, 0.0) - chance) < EXACT, sequence


def first_token(distribution: Joint) -> Joint:
    result: Joint = defaultdict(float)
    for sequence, chance in distribution.items():
        result[sequence[:1]] += chance
    return result


@pytest.mark.parametrize("num_draft", [1, 2])
@pytest.mark.parametrize("kind", ["neural", "pruned", "point mass"])
def test_a_round_emits_the_targets_own_distribution(kind: str, num_draft: int) -> None:
    for seed in range(4):
        p, q = conditional(seed), conditional(seed + 50, zero=(1, 4) if kind == "pruned" else ())
        if kind == "point mass":
            drafts = iter([(1.0, Draft([3, 3][:num_draft]))])
        else:
            drafts = neural_drafts(q, num_draft)
        found = speculative_joint(p, drafts, num_draft + 1)
        wanted = joint(p, num_draft + 1)
        assert_same(found, wanted)
        assert_same(first_token(found), first_token(wanted))


def test_tokens_outside_the_targets_support_are_never_emitted() -> None:
    p, q = conditional(1, zero=(0, 2)), conditional(2)
    found = speculative_joint(p, neural_drafts(q, 2), 3)
    assert_same(found, joint(p, 3))


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    p = conditional(3)
    for _, draft in neural_drafts(p, 2):
        accept_K, residual_NV = acceptance(
            rows(p, tuple(draft.tokens), 3), draft.tokens, draft.probs_KV
        )
        assert accept_K.tolist() == [1.0, 1.0]
        assert residual_NV.isfinite().all()


PLANNER_P = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
PLANNER_Q = torch.tensor([0.2, 0.5, 0.3, 0.0, 0.0], dtype=torch.float64)


def planned(keeps: Callable[[int], bool]) -> Joint:
    """First token when a planner keeps or drops a sampled draft token."""
    found: Joint = defaultdict(float)
    for token in range(3):
        chance = float(PLANNER_Q[token])
        draft = Draft([token], PLANNER_Q[None]) if keeps(token) else Draft()
        for weight, emitted in one_round(PLANNER_P.expand(len(draft.tokens) + 1, V), draft):
            found[emitted[:1]] += chance * weight
    return found


TARGETS_OWN: Joint = {(token,): chance for token, chance in enumerate(PLANNER_P.tolist())}


def test_the_enumeration_catches_a_planner_that_looks_at_the_drafted_token() -> None:
    found = planned(lambda token: float(PLANNER_Q[token]) >= 0.4)
    assert_same(found, {(0,): 0.45, (1,): 0.45, (2,): 0.10, (3,): 0.0, (4,): 0.0})
    with pytest.raises(AssertionError):
        assert_same(found, TARGETS_OWN)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_planner_that_does_not_look_at_the_drafted_token_is_lossless(keeps: bool) -> None:
    assert_same(planned(lambda _: keeps), TARGETS_OWN)


def scripts(p_NV: Tensor, draft: Draft) -> Iterator[tuple[float, list[float]]]:
    """Uniforms in the middle of every cell that `verify` can tell apart, and the cell's size."""
    accept_K, residual_NV = acceptance(p_NV, draft.tokens, draft.probs_KV)
    chances = accept_K.tolist()
    for k in range(len(chances) + 1):
        weight, uniforms = 1.0, []
        for chance in chances[:k]:
            weight, uniforms = weight * chance, [*uniforms, chance / 2]
        if k < len(chances):
            weight, uniforms = weight * (1 - chances[k]), [*uniforms, (1 + chances[k]) / 2]
        edges = [0.0, *residual_NV[k].cumsum(-1).tolist()]
        for low, high in itertools.pairwise(edges):
            if weight * (high - low) > 0:
                yield weight * (high - low), [*uniforms, (low + high) / 2]


@pytest.mark.parametrize("kind", ["neural", "pruned", "point mass"])
def test_verify_takes_every_branch_with_its_probability(kind: str) -> None:
    p, q = conditional(7), conditional(8, zero=(0, 3) if kind == "pruned" else ())
    drafts = [(1.0, Draft([2, 4]))] if kind == "point mass" else list(neural_drafts(q, 2))
    found: Joint = defaultdict(float)
    accepted = set()
    for chance, draft in drafts:
        p_NV = rows(p, tuple(draft.tokens), 3)
        for weight, uniforms in scripts(p_NV, draft):
            supply = iter(uniforms)
            verdict = verify(p_NV, draft, lambda supply=supply: next(supply))
            assert not list(supply), "verify must draw one uniform per examined token and one more"
            accepted.add(verdict.num_accepted)
            emitted = (*draft.tokens[: verdict.num_accepted], verdict.next_token)
            for sequence, rest in joint(p, 3, emitted).items():
                found[sequence] += chance * weight * rest
    assert accepted == {0, 1, 2}
    assert_same(found, joint(p, 3))


class ScriptedRow(Row):
    """A row whose randomness is given."""

    def __init__(self, uniforms: list[float]) -> None:
        super().__init__(Request("r", [0], 9, sampling=Sampling(temperature=1.0)))
        self.supply = iter(uniforms)

    def uniform(self) -> float:
        return next(self.supply)


def test_two_rows_of_a_batch_are_independent_and_each_exact() -> None:
    """Catches logits rows given to the wrong request and randomness shared between requests."""
    p_a, q_a, p_b = conditional(11), conditional(12), conditional(13)
    draft_b = Draft([1, 0])
    p_b_NV = rows(p_b, (1, 0), 3)
    found: Joint = defaultdict(float)
    for chance, draft_a in neural_drafts(q_a, 1):
        p_a_NV = rows(p_a, tuple(draft_a.tokens), 2)
        logits_NV = torch.cat([p_a_NV, p_b_NV]).log()
        for (weight_a, uniforms_a), (weight_b, uniforms_b) in itertools.product(
            scripts(p_a_NV, draft_a), scripts(p_b_NV, draft_b)
        ):
            batch = [ScriptedRow(uniforms_a), ScriptedRow(uniforms_b)]
            a, b = judge(batch, [draft_a, draft_b], logits_NV)
            emitted_a = (*draft_a.tokens[: a.num_accepted], a.next_token)
            emitted_b = (*draft_b.tokens[: b.num_accepted], b.next_token)
            found[emitted_a[0], emitted_b[0]] += chance * weight_a * weight_b
    wanted = {
        (x, y): float(p_a(())[x] * p_b(())[y]) for x, y in itertools.product(range(V), repeat=2)
    }
    assert_same(found, wanted)


def test_greedy_verification_is_sampling_from_one_hot_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        num_draft = int(torch.randint(0, 4, (), generator=generator))
        argmax_N = torch.randint(0, 2, (num_draft + 1,), generator=generator).tolist()
        draft = torch.randint(0, 2, (num_draft,), generator=generator).tolist()
        one_hot_NV = torch.nn.functional.one_hot(torch.tensor(argmax_N), V).double()

        def uniform() -> float:
            return float(torch.rand((), generator=generator))

        assert verify(one_hot_NV, Draft(draft), uniform) == verify_greedy(argmax_N, draft)
