"""The vocabulary losses against float64, against their plain forms, and at their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlite.model.losses import (
    Labels,
    LossWeights,
    expected_tau,
    row_terms,
    target_log_probs,
    vocab_loss,
)
from train.loop import summarise

A, K, F, V, D = 6, 4, 8, 30, 10
KEPT = torch.tensor([1, 2, 3, 5, 8, 13, 21, 29])
TERMS = {
    "ce": LossWeights(ce=1.0),
    "tv": LossWeights(tv=1.0),
    "kl": LossWeights(kl=1.0),
    "stable": LossWeights(ce=0.1, tv=1.0),
    "tau": LossWeights(tau=1.0),
}


class Problem:
    """Random blocks with a target, a teacher and some unsupervised tails."""

    def __init__(self, *, pruned: bool, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        self.ids = KEPT if pruned else torch.arange(V)
        self.features = randn(A, K, F).requires_grad_()
        self.weight = randn(len(self.ids), F).requires_grad_()
        self.head_VD, self.teacher_logits = randn(V, D), randn(A * K, len(self.ids))
        label_AK = torch.randint(0, V, (A, K), generator=draw)
        table = torch.full((V,), -1)
        table[self.ids] = torch.arange(len(self.ids))
        valid_AK = torch.ones(A, K, dtype=torch.bool)
        valid_AK[1, 2:] = False
        valid_AK[4, 1:] = False
        self.labels = Labels(label_AK, table[label_AK], valid_AK, randn(A, K, D))
        self.pruned = pruned

    def target_logits(self, state: Tensor, head: Tensor | None = None) -> Tensor:
        return state @ (self.head_VD if head is None else head).T

    def run(self, loss: LossWeights, chunk_elements: int) -> Tensor:
        ids = self.ids if self.pruned else None
        target = target_log_probs(self.labels, self.target_logits, ids, self.head_VD[self.ids])
        return vocab_loss(
            self.features,
            self.weight,
            self.labels,
            loss,
            self.labels.weights(4.0),
            target=target,
            teacher=lambda rows: self.teacher_logits[rows].log_softmax(-1),
            chunk_elements=chunk_elements,
        )[0]

    def gradients(self, loss: LossWeights, chunk_elements: int = 1) -> list[Tensor]:
        value = self.run(loss, chunk_elements)
        return [value.detach(), *torch.autograd.grad(value, [self.features, self.weight])]

    def plain(self, loss: LossWeights) -> list[Tensor]:
        """The same from the definitions, all rows at once, in autograd's hands."""
        q = (self.features @ self.weight.T).softmax(-1)
        p = self.target_logits(self.labels.state_AKD).softmax(-1)
        w = self.labels.valid_AK * torch.exp(-torch.arange(K) / 4.0)
        full = torch.zeros(A, K, V, dtype=q.dtype)
        full = full.index_copy(-1, self.ids, q)
        tv = (p - full).abs().sum(-1)
        inside = self.labels.draft_label_AK >= 0
        picked = full.gather(-1, self.labels.label_AK[..., None]).squeeze(-1)
        ce = -torch.where(inside, picked, torch.ones_like(picked)).log()
        h = self.teacher_logits.view(A, K, -1).softmax(-1)
        kl = (h * (h.log() - q.log())).sum(-1)
        alive = ((1 - tv / 2) * self.labels.valid_AK).cumprod(-1).sum(-1)
        value = (
            loss.ce * (w * ce).sum() / (w * inside).sum()
            + loss.tv * (w * tv).sum() / w.sum()
            + loss.kl * (w * kl).sum() / w.sum()
            - loss.tau * (1 + alive).mean()
        )
        return [value.detach(), *torch.autograd.grad(value, [self.features, self.weight])]


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_chunked_loss_and_gradients_equal_the_definitions(name: str, pruned: bool) -> None:
    problem = Problem(pruned=pruned)
    wanted = problem.plain(TERMS[name])
    for chunk_elements in (1, 2 * K * V, 10**9):
        for got, want in zip(problem.gradients(TERMS[name], chunk_elements), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_known_normalisers_give_the_same_pruned_target() -> None:
    problem = Problem(pruned=True)
    head = problem.head_VD[problem.ids]
    slow = target_log_probs(problem.labels, problem.target_logits, problem.ids, head)
    problem.labels.log_z_AK = problem.target_logits(problem.labels.state_AKD).logsumexp(-1)
    fast = target_log_probs(problem.labels, problem.target_logits, problem.ids, head)
    torch.testing.assert_close(fast(slice(0, 9)), slow(slice(0, 9)))


def test_positions_behind_an_unsupervised_token_change_nothing() -> None:
    """N12: the mask follows the predicted token, to the end of the block."""
    problem = Problem(pruned=False)
    gradient = problem.gradients(TERMS["stable"])[1]
    assert gradient[1, 2:].abs().max() == 0 and gradient[4, 1:].abs().max() == 0
    assert (gradient[0].abs().amax(-1) > 0).all()


def test_uncovered_labels_are_masked_and_later_positions_stay() -> None:
    """N17: a label outside the draft vocabulary gives no CE; the positions behind it still do."""
    problem = Problem(pruned=True)
    problem.labels.label_AK[0] = torch.tensor([1, 0, 2, 3])
    problem.labels.draft_label_AK[0] = torch.tensor([0, -1, 1, 2])
    gradient = problem.gradients(TERMS["ce"])[1]
    assert gradient[0, 1].abs().max() == 0
    assert (gradient[0, [0, 2, 3]].abs().amax(-1) > 0).all()


def test_tv_of_a_pruned_vocabulary_is_one_minus_the_true_acceptance() -> None:
    problem = Problem(pruned=True)
    log_p = target_log_probs(
        problem.labels, problem.target_logits, problem.ids, problem.head_VD[problem.ids]
    )(slice(0, A * K))
    logits = (problem.features @ problem.weight.T).flatten(0, 1)
    tv = row_terms(logits, problem.labels.draft_label_AK.flatten(), log_p, None)["tv"]
    acceptance = torch.minimum(log_p.exp(), logits.softmax(-1)).sum(-1)  # sum_v min(p, q)
    torch.testing.assert_close(1 - tv / 2, acceptance)


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_gradients_near_convergence_are_within_one_percent_of_float64(name: str) -> None:
    """N1: at overlap 0.98 bfloat16 softmaxes lose a fifth of the gradient; float32 ones do not."""
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(64, 2000, generator=draw, dtype=torch.float64) * 3
    logits = target + 0.058 * torch.randn(64, 2000, generator=draw, dtype=torch.float64)
    overlap = torch.minimum(target.softmax(-1), logits.softmax(-1)).sum(-1).mean()
    assert 0.975 < overlap < 0.985
    labels = torch.zeros(64, dtype=torch.long)

    def gradient(dtype: torch.dtype) -> Tensor:
        x = logits.to(dtype).requires_grad_()
        reference = target.to(dtype).log_softmax(-1)
        terms = row_terms(x, labels, reference, reference)
        return torch.autograd.grad(terms[name].sum(), x)[0].double()

    exact, ours = gradient(torch.float64), gradient(torch.float32)
    assert (ours - exact).norm() / exact.norm() < 0.01
    assert (gradient(torch.bfloat16) - exact).norm() / exact.norm() > 0.05  # why float32


def test_expected_tau_counts_the_bonus_and_stops_at_the_mask() -> None:
    tv = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    valid = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool()
    assert expected_tau(tv, valid).tolist() == [3.0, 2.5, 2.0]


def test_logged_expected_tau_is_the_mean_over_anchors() -> None:
    """Not one plus the product of mean overlaps: anchors differ, and products do not average."""
    problem = Problem(pruned=False)
    target = target_log_probs(problem.labels, problem.target_logits, None, problem.head_VD)
    totals = problem.labels.weights(4.0)
    _, stats = vocab_loss(
        problem.features, problem.weight, problem.labels, TERMS["tv"], totals, target=target
    )
    q = (problem.features @ problem.weight.T).softmax(-1)
    p = problem.target_logits(problem.labels.state_AKD).softmax(-1)
    tau_A = expected_tau((p - q).abs().sum(-1), problem.labels.valid_AK)
    assert summarise(stats)["expected_tau"] == pytest.approx(float(tau_A.detach().mean()), rel=1e-5)


def test_a_loss_without_terms_is_refused() -> None:
    with pytest.raises(ValueError, match="no term"):
        LossWeights()


def test_no_tensor_of_all_rows_times_the_vocabulary_lives() -> None:
    """M3: with a large vocabulary the biggest tensor made is the chunk's, not [A*K, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    biggest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                biggest = max(biggest, out.numel())
            return out

    num_vocab, num_blocks, num_draft = 4000, 40, 7
    labels = torch.randint(0, num_vocab, (num_blocks, num_draft))
    made = Labels(labels, labels, torch.ones_like(labels).bool(), torch.randn(*labels.shape, D))
    features = torch.randn(*labels.shape, F, requires_grad=True)
    weight = torch.randn(num_vocab, F, requires_grad=True)
    with Watch():
        loss, _ = vocab_loss(
            features,
            weight,
            made,
            LossWeights(ce=1.0),
            made.weights(4.0),
            chunk_elements=4 * num_draft * num_vocab,
        )
        loss.backward()
    assert biggest <= 4 * num_draft * num_vocab < labels.numel() * num_vocab / 9


def test_autocast_does_not_round_the_logits_of_a_total_variation() -> None:
    """N1: rounded to bfloat16 they bend the gradient by a quarter at an overlap of 0.98."""
    torch.manual_seed(0)
    num_rows, width, vocab_size = 64, 64, 5000
    features_AKF = torch.randn(num_rows, 1, width).bfloat16()
    weight_VF = 0.1 * torch.randn(vocab_size, width)
    noise = 0.05 * torch.randn(num_rows, vocab_size)
    log_p = (features_AKF[:, 0].float() @ weight_VF.T + noise).double().log_softmax(-1)
    label_A1 = torch.zeros(num_rows, 1, dtype=torch.long)
    labels = Labels(label_A1, label_A1, torch.ones(num_rows, 1, dtype=torch.bool), features_AKF)
    grads = []
    for dtype in (torch.float64, torch.float32):
        given = (features_AKF.double() if dtype == torch.float64 else features_AKF).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            total, stats = vocab_loss(
                given,
                weight_VF.to(dtype),
                labels,
                LossWeights(tv=1.0),
                dict.fromkeys(("ce", "kl", "tv", "tau"), float(num_rows)),
                target=lambda rows, dtype=dtype: log_p[rows].to(dtype),
            )
        grads.append(torch.autograd.grad(total, given)[0].double())
    assert 0.97 < float(stats["overlap"].sum()) / num_rows < 0.99
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.01
