"""Sequential heads: what restores the order of tokens inside a block (DLite section 4.1.2).

A head turns the backbone's states h_K and the previous tokens into *features*; logits are
features @ vocab_weight.T for every head, so one chunked loss serves all. `step` is one position,
`unroll` all of them with the true previous tokens; a test holds the two equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlite.model.config import DraftConfig


class RecurrentState(nn.Module):
    """The low-rank gated state s_T of the tokens drafted so far (DLite equation 4).

    gate, cand = split(W [s_{T-1}; E_r(x)])
    s_T = sigmoid(gate) s_{T-1} + (1 - sigmoid(gate)) tanh(cand)
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.rank = config.rank
        self.prev_token_embedding = nn.Embedding(config.vocab_size, config.rank)
        self.state_proj = nn.Linear(2 * config.rank, 2 * config.rank, bias=False)

    def initial(self, h_AKD: Tensor) -> Tensor:
        return h_AKD.new_zeros(h_AKD.shape[0], self.rank)

    def advance(self, state_AR: Tensor, token_term_A2R: Tensor) -> Tensor:
        mixed_A2R = token_term_A2R + state_AR @ self.state_proj.weight[:, : self.rank].T
        gate_AR, cand_AR = mixed_A2R.chunk(2, dim=-1)
        gate_AR = gate_AR.sigmoid()
        return gate_AR * state_AR + (1 - gate_AR) * cand_AR.tanh()

    def token_term(self, prev_A: Tensor) -> Tensor:
        return self.prev_token_embedding(prev_A) @ self.state_proj.weight[:, self.rank :].T

    def states(self, h_AKD: Tensor, prev_AK: Tensor) -> Tensor:
        """s_1 .. s_K [A, K, R] with the previous tokens given."""
        state_AR, states = self.initial(h_AKD), []
        for term_A2R in self.token_term(prev_AK).unbind(1):
            state_AR = self.advance(state_AR, term_A2R)
            states.append(state_AR)
        return torch.stack(states, dim=1)


class LowRankHead(RecurrentState):
    """The paper's head: one R -> V projection per position, after the order is restored.

    u_T = Linear_{R+D->R} [s_T ; h_T]; logits = Linear_R->V u_T. h_T is taken after the final norm.
    """

    norm_first = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.state_hidden_mlp = nn.Linear(config.rank + config.hidden_size, config.rank, bias=False)
        self.output_proj = nn.Linear(config.rank, config.num_draft_ids, bias=False)

    def vocab_weight(self, target_head_VD: Tensor) -> Tensor:
        return self.output_proj.weight

    def unroll(self, h_AKD: Tensor, prev_AK: Tensor, norm: nn.Module) -> Tensor:
        return self.state_hidden_mlp(torch.cat([self.states(h_AKD, prev_AK), h_AKD], dim=-1))

    def step(self, state_AR: Tensor, h_AD: Tensor, prev_A: Tensor, norm: nn.Module):
        state_AR = self.advance(state_AR, self.token_term(prev_A))
        return self.state_hidden_mlp(torch.cat([state_AR, h_AD], dim=-1)), state_AR

    @torch.no_grad()
    def init_from_svd(self, target_head_VD: Tensor) -> None:
        """Start the vocabulary projection from the best rank-R copy of the target's LM head.

        W = U S V^T truncated to R: output_proj = U sqrt(S), the h part of state_hidden_mlp =
        sqrt(S) V^T (ours; the paper starts both at random).
        """
        weight_VD = target_head_VD.float()
        # The right singular vectors from the D x D Gram matrix: V is far larger than D.
        values_D, vectors_DD = torch.linalg.eigh(weight_VD.T @ weight_VD)
        top_DR = vectors_DD[:, -self.rank :]
        root_R = values_D[-self.rank :].clamp(min=1e-12).pow(0.25)
        self.output_proj.weight.copy_(weight_VD @ top_DR / root_R)
        self.state_hidden_mlp.weight[:, self.rank :].copy_((top_DR * root_R).T)


class TiedHead(RecurrentState):
    """The target's frozen LM head on norm(h_T + W_u s_T); learns faster on little data."""

    norm_first = False

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.state_out = nn.Linear(config.rank, config.hidden_size, bias=False)

    def vocab_weight(self, target_head_VD: Tensor) -> Tensor:
        return target_head_VD

    def unroll(self, h_AKD: Tensor, prev_AK: Tensor, norm: nn.Module) -> Tensor:
        return norm(h_AKD + self.state_out(self.states(h_AKD, prev_AK)))

    def step(self, state_AR: Tensor, h_AD: Tensor, prev_A: Tensor, norm: nn.Module):
        state_AR = self.advance(state_AR, self.token_term(prev_A))
        return norm(h_AD + self.state_out(state_AR)), state_AR


class MarkovHead(nn.Module):
    """DSpark's vanilla head: full logits first, then a low-rank correction by the token before.

    logits_T = W_head h_T + W_2 W_1[x_{T-1}]: as features, [h_T ; W_1[x]] on [W_head , W_2].
    """

    norm_first = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.num_draft_ids, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def initial(self, h_AKD: Tensor) -> Tensor:
        return h_AKD.new_zeros(h_AKD.shape[0], 0)

    def vocab_weight(self, target_head_VD: Tensor) -> Tensor:
        return torch.cat([target_head_VD, self.markov_w2.weight], dim=-1)

    def unroll(self, h_AKD: Tensor, prev_AK: Tensor, norm: nn.Module) -> Tensor:
        return torch.cat([h_AKD, self.markov_w1(prev_AK)], dim=-1)

    def step(self, state_A0: Tensor, h_AD: Tensor, prev_A: Tensor, norm: nn.Module):
        return torch.cat([h_AD, self.markov_w1(prev_A)], dim=-1), state_A0


class NoHead(nn.Module):
    """DFlash: the positions of a block know nothing of each other's tokens."""

    norm_first = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()

    def initial(self, h_AKD: Tensor) -> Tensor:
        return h_AKD.new_zeros(h_AKD.shape[0], 0)

    def vocab_weight(self, target_head_VD: Tensor) -> Tensor:
        return target_head_VD

    def unroll(self, h_AKD: Tensor, prev_AK: Tensor, norm: nn.Module) -> Tensor:
        return h_AKD

    def step(self, state_A0: Tensor, h_AD: Tensor, prev_A: Tensor, norm: nn.Module):
        return h_AD, state_A0


HEADS = {"lowrank": LowRankHead, "tied": TiedHead, "markov": MarkovHead, "none": NoHead}
