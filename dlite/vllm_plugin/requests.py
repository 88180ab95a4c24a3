"""From vLLM's requests to ours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dlite.metadata import Metadata, parse_metadata
from dlite.types import Request, Sampling
from dlite.vllm_plugin.calls import Call

logger = logging.getLogger("dlite")
GREEDY_BELOW = 1e-5  # vLLM's bound


def call_of(new: Any, max_length: int, tokenizer: Callable[[], Any]) -> Call | None:
    """`new` is vLLM's NewRequestData. None: not drafted for (no tokens, or not generating)."""
    params = new.sampling_params
    if params is None or not new.prompt_token_ids:
        return None
    try:
        metadata = parse_metadata(params.extra_args)
    except ValueError:  # refused at the door of a server; an engine can be called without one
        logger.warning("a request's dlite_ arguments are malformed and ignored")
        metadata = Metadata()
    request = Request(
        new.req_id,
        list(new.prompt_token_ids),
        params.max_tokens if params.max_tokens is not None else max_length,
        frozenset(params.all_stop_token_ids),
        _sampling(params),
        metadata.session,
        metadata.agent,
    )
    return Call(request, metadata, _ends_with(params.stop or [], tokenizer), max_length)


def _sampling(params: Any) -> Sampling:
    """How to draft. A grammar cuts drafts at the first token that it forbids: a cut that depends on
    drawn tokens would bend the distribution, so such requests are drafted by argmax."""
    if params.temperature < GREEDY_BELOW or params.structured_outputs is not None:
        return Sampling()
    return Sampling(
        params.temperature,
        max(0, params.top_k),
        params.top_p,
        params.seed,
    )


def _ends_with(stop: list[str], tokenizer: Callable[[], Any]) -> Callable[[list[int]], bool]:
    def ends(output: list[int]) -> bool:
        text = tokenizer().decode(output)
        return any(string in text for string in stop)

    return ends if stop else lambda _: False
