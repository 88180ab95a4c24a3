"""One vLLM engine in this process for the tests of a module; what they ask of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dlite.types import Draft, View
from dlite.vllm_plugin.counters import Counters

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process: tests see its parts
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Recorder(Counters):
    """The (drafted, accepted) of every verified step, by agent."""

    rounds: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def judged(self, role: str, draft: Draft, num_accepted: int) -> None:
        self.rounds.setdefault(role, []).append((len(draft.tokens), num_accepted))


class Engine:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        (self.runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        self.calls = self.runner.drafter.calls

    def generate(
        self,
        prompts: Sequence[list[int]],
        drafter: str,
        *,
        agents: Sequence[str] = (),
        **params: Any,
    ) -> list[list[int]]:
        from vllm import SamplingParams

        asked = [
            SamplingParams(
                **{"temperature": 0.0, "max_tokens": 24, **params},
                extra_args={"dlite_drafter": drafter, "dlite_agent_id": agent},
            )
            for agent in agents or [""] * len(prompts)
        ]
        done = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in done]

    def rounds(self, prompts: Sequence[list[int]], drafter: str, **params: Any) -> Any:
        """What `generate` gives, and each prompt's (drafted, accepted) per step."""
        recorder, before = Recorder(), self.calls.counters
        self.calls.counters = recorder
        try:
            agents = [f"agent{i}" for i in range(len(prompts))]
            outputs = self.generate(prompts, drafter, agents=agents, **params)
        finally:
            self.calls.counters = before
        return outputs, [recorder.rounds.get(agent, []) for agent in agents]

    def watch_taps(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Tensor]]:
        """Fills with the tokens and taps of every view that `dlite` drafts for."""
        seen, drafter = [], self.calls.drafters["dlite"]
        propose = drafter.propose

        def watch(views: list[View]) -> list[Draft]:
            seen.extend((list(view.tokens), view.taps_LD.clone()) for view in views)
            return propose(views)

        monkeypatch.setattr(drafter, "propose", watch)
        return seen

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}")

    def drafted_and_accepted(self) -> tuple[float, float]:
        names = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
        return self.metric(names[0]), self.metric(names[1])


@contextmanager
def engine(
    folder: Path | str,
    drafters: Sequence[str],
    draft: Path | str | None,
    settings: dict[str, dict[str, Any]] | None = None,
    **args: Any,
) -> Iterator[Engine]:
    os.environ.update(ENVIRONMENT, XDG_CACHE_HOME=tempfile.mkdtemp())
    from vllm import LLM

    from dlite.vllm_plugin.command import engine_arguments

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        **engine_arguments(drafters, draft, 7, settings),
        **args,
    )
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()
