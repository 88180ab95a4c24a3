"""vLLM's model runner, which shows our drafters what it did and takes their drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dlite.types import Draft
from dlite.vllm_plugin.calls import Step
from dlite.vllm_plugin.requests import call_of
from dlite.vllm_plugin.taps import decision_rows, gather


class Drafting:
    """Mixed into a V1 model runner. On the last pipeline rank `drafter` is our Proposer; under
    tensor parallelism rank 0 drafts and tells the others."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        runner: Any = self
        runner.use_aux_hidden_state_outputs = bool(runner.drafter.aux_layer_ids)

    def _get_eagle3_aux_layers_from_config(self: Any) -> tuple[int, ...]:
        return self.drafter.aux_layer_ids

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Drafts are cut to what fits: one long request doesn't end drafting for all."""
        return common_attn_metadata is not None

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        calls = self.drafter.calls
        for id in scheduler_output.finished_req_ids:
            calls.end(id)
        for new in scheduler_output.scheduled_new_reqs:
            if (
                call := call_of(new, self.max_model_len, lambda: self.drafter.tokenizer)
            ) is not None:
                calls.start(call)
        return super()._update_states(scheduler_output)

    def propose_draft_token_ids(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        calls = self.drafter.calls
        ids = self.input_batch.req_ids
        verified = spec_decode_metadata.num_draft_tokens if spec_decode_metadata else [0] * len(ids)
        steps = [
            Step(id, sampled, num)
            for id, sampled, num in zip(ids, sampled_token_ids, verified, strict=True)
        ]
        taps_LD: dict[str, Tensor] = {}
        if tapped := [i for i, step in enumerate(steps) if calls.wants_taps(step)]:
            starts = common_attn_metadata.query_start_loc_cpu[: len(ids) + 1].tolist()
            rows = decision_rows(starts, verified, [len(s.sampled) for s in steps])
            taps_BLD = gather(
                [rows[i] for i in tapped],
                hidden_states,
                aux_hidden_states or (),
                with_last=self.drafter.num_layers - 1 in calls.tap_ids,
            )
            taps_LD = {ids[i]: taps for i, taps in zip(tapped, taps_BLD, strict=True)}
        return [draft.tokens for draft in calls.step(steps, taps_LD)]

    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> Tensor | None:
        """Distributions [N, V] of the drafted tokens, requests one after the other; None when all
        are point masses, which vLLM assumes then."""
        drafts: list[Draft] = []
        for id, num in zip(
            self.input_batch.req_ids, spec_decode_metadata.num_draft_tokens, strict=True
        ):
            if num:
                drafts.append(self.drafter.calls.draft_of(id).cut(num))
        if all(draft.probs_KV is None for draft in drafts):
            return None
        tokens_N = torch.tensor([t for draft in drafts for t in draft.tokens], device=self.device)
        probs_NV = torch.zeros(
            len(tokens_N), self.model_config.get_vocab_size(), device=self.device
        )
        end = 0
        for draft in drafts:
            start, end = end, end + len(draft.tokens)
            if draft.probs_KV is None:
                probs_NV[torch.arange(start, end), tokens_N[start:end]] = 1.0
            else:
                probs_NV[start:end] = draft.probs_KV
        return probs_NV


class GPURunner(Drafting, GPUModelRunner):
    pass


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class CPURunner(Drafting, CPUModelRunner):
        pass
