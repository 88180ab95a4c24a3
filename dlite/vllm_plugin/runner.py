"""vLLM's model runner, which shows our drafters what it did and takes their drafts."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dlite.taps import check_taps
from dlite.types import Draft, Request, View
from dlite.vllm_plugin.calls import Step
from dlite.vllm_plugin.requests import call_of
from dlite.vllm_plugin.taps import decision_rows, gather
from dlite.vllm_plugin.timing import StepTimes, cache_file


class Drafting:
    """Mixed into a V1 model runner. `drafter` is our Proposer. Raises ValueError for
    pipeline parallelism, and for hidden states that can't be the target's."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise ValueError(
                f"pipeline_parallel_size is {stages}: drafts are made where the first and the "
                "last layer run; use --tensor-parallel-size"
            )
        super().__init__(vllm_config, device)
        runner: Any = self
        runner.taps_checked = False
        runner.step_times = None
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

    def measure_steps(self: Any) -> None:
        """Tells the planner what a step costs, and goes on telling it."""
        proposer = self.drafter
        if proposer.planner is None:
            return
        config = self.vllm_config
        parallel = config.parallel_config
        where = cache_file(
            config.model_config.model,
            str(self.dtype),
            current_platform.get_device_name(),
            parallel.tensor_parallel_size,
            torch.get_num_threads(),
            self.max_num_reqs,
            self.num_spec_tokens,
        )
        self.step_times = StepTimes(
            self._time_step,
            self._time_draft,
            max_batch=min(self.max_num_reqs, self.max_num_tokens),
            num_draft=min(self.num_spec_tokens, self.max_num_tokens - 1),
            cache=where,
        )
        proposer.planner.costs = self.step_times.costs
        proposer.calls.ridge_tokens = self.step_times.ridge_tokens

    @torch.inference_mode()
    def _time_step(self: Any, num_tokens: int) -> None:
        hidden_ND, _ = self._dummy_run(min(num_tokens, self.max_num_tokens), skip_eplb=True)
        self.model.compute_logits(hidden_ND[:num_tokens]).argmax(-1).tolist()

    @torch.inference_mode()
    def _time_draft(self: Any, batch: int) -> None:
        drafter = self.drafter
        shape = len(drafter.tap_ids), drafter.draft.config.hidden_size
        request = Request("timing", [0], 1)
        taps_LD = torch.rand(shape, device=self.device, dtype=self.dtype)
        view = View(request, [0], drafter.draft.config.num_draft_tokens, taps_LD)
        drafter.calls.drafters["hybrid"].neural.propose([view] * batch)

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_began = time.perf_counter()
        return super().execute_model(*args, **kwargs)

    def _observe_time(self: Any, scheduler_output: Any, steps: list[Step]) -> None:
        """Of a step in which every request decoded."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if self.step_times and tokens == sum(1 + step.num_verified for step in steps):
            seconds = time.perf_counter() - self._step_began
            self.step_times.observe(tokens, len(steps), seconds)

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
        self._observe_time(scheduler_output, steps)
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
            if not self.taps_checked:
                check_taps(taps_BLD, calls.tap_ids)
                self.taps_checked = True
            taps_LD = {ids[i]: taps for i, taps in zip(tapped, taps_BLD, strict=True)}
        return self._agreed([draft.tokens for draft in calls.step(steps, taps_LD)])

    def _agreed(self, drafts: list[list[int]]) -> list[list[int]]:
        """Rank 0's drafts: all tensor parallel ranks must verify the same tokens, and learning by
        the clock or a last digit could part them."""
        group = get_tp_group()
        return drafts if group.world_size == 1 else group.broadcast_object(drafts, src=0)

    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """A step without any draft is plain decoding: vLLM's rejection sampler takes the maximum
        of no top-k there, and fails."""
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return super()._sample(logits, spec_decode_metadata)

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
