"""Verification: which draft tokens stand, and what the target says instead.

Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023): accept d with
min(1, p(d) / q(d)), on rejection draw from (p - q)+ normalised, after a full accept draw from p.
Everything exact rests on `acceptance`, a pure function that the tests enumerate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlite.sampling import draw
from dlite.types import Draft, Verdict


def acceptance(p_NV: Tensor, draft: Sequence[int], q_KV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Acceptance probabilities [K] of the draft tokens and residual distributions [K+1, V].

    `p_NV` (N = K+1) are the target's distributions at the anchor and behind each draft token.
    `q_KV` are the distributions that the draft tokens were drawn from; None: point masses.
    Residual k is drawn from when token k is rejected; the last one after a full accept.
    """
    num_draft = len(draft)
    index_K1 = torch.tensor(list(draft), dtype=torch.long, device=p_NV.device).unsqueeze(-1)
    p_draft_K = p_NV[:num_draft].gather(-1, index_K1).squeeze(-1)
    if q_KV is None:
        accept_K = p_draft_K
        residual_KV = p_NV[:num_draft].scatter(-1, index_K1, 0.0)
    else:
        q_draft_K = q_KV.gather(-1, index_K1).squeeze(-1)
        assert bool((q_draft_K > 0).all()), "a draft token that its own distribution excludes"
        accept_K = (p_draft_K / q_draft_K).clamp(max=1.0)
        residual_KV = (p_NV[:num_draft] - q_KV).clamp(min=0.0)
    # p == q leaves no residual mass, and then a rejection cannot happen: any value will do.
    mass_K1 = residual_KV.sum(-1, keepdim=True)
    residual_KV = torch.where(mass_K1 > 0, residual_KV / mass_K1, p_NV[:num_draft])
    return accept_K, torch.cat([residual_KV, p_NV[num_draft : num_draft + 1]])


def verify(p_NV: Tensor, draft: Draft, uniform: Callable[[], float]) -> Verdict:
    """Judge a draft against the target's warped distributions `p_NV` (N = K+1).

    `uniform` gives numbers in [0, 1): one per examined draft token, then one for the next token.
    """
    accept_K, residual_NV = acceptance(p_NV, draft.tokens, draft.probs_KV)
    num_accepted = 0
    for chance in accept_K.tolist():
        if uniform() >= chance:
            break
        num_accepted += 1
    return Verdict(num_accepted, draw(residual_NV[num_accepted], uniform()))


def verify_greedy(argmax_N: Sequence[int], draft: Sequence[int]) -> Verdict:
    """`verify` at temperature 0, from the target's argmax at each of the K+1 rows alone."""
    num_accepted = 0
    for proposed, wanted in zip(draft, argmax_N, strict=False):
        if proposed != wanted:
            break
        num_accepted += 1
    return Verdict(num_accepted, argmax_N[num_accepted])
