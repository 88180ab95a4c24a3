"""The plugin in a real vLLM over a random Llama: what it commits is the target's own, however
requests are cut, shared and dropped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY_DRAFT, save_tiny_llama

from dlite import checkpoint
from dlite.decode import decode
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel
from dlite.types import Request

pytest.importorskip("vllm", reason="vLLM is not installed here: bash scripts/setup.sh vllm")

from vllm_engine import Engine, engine

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
DRAFT = {**TINY_DRAFT, "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 1}
NEW_TOKENS = 24
DRAFTERS = ["ngram", "sam", "agentspec", "agspec", "dlite", "hybrid"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("served") / "target", **SIZES)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return TargetModel.load(str(target_folder))


@pytest.fixture(scope="module")
def served(target_folder: Path, target: TargetModel) -> Iterator[Engine]:
    """16 requests at once with room for 20 blocks of 32 tokens; prompts are read 64 tokens at a
    time; a prefix that was read is kept."""
    torch.manual_seed(1)
    model = DraftModel(DraftConfig(**DRAFT)).bind(target)
    draft = target_folder.with_name("draft")
    checkpoint.save(model, draft, target=target, training={})
    with engine(
        target_folder,
        DRAFTERS,
        draft,
        {"hybrid": {"drafters": ["sam"]}},
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=20,
        block_size=32,
        enable_prefix_caching=True,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, 512) for _ in range(draw.randrange(5, 150))] for _ in range(16)]


@pytest.fixture(scope="module")
def plain(target: TargetModel, prompts: list[list[int]]) -> list[list[int]]:
    """From Hugging Face's model without any cache, a whole forward for each token."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        open_ = [i for i, out in enumerate(outputs) if not target.eos_ids & set(out)]
        texts = [prompts[i] + outputs[i] for i in open_]
        states = target.capture(texts, (target.num_layers - 1,))
        logits_NV = target.logits(torch.stack([state_SLD[-1, 0] for state_SLD in states]))
        for i, token in zip(open_, logits_NV.argmax(-1).tolist(), strict=True):
            outputs[i].append(token)
    return outputs


def test_cached_decoding_works_with_the_transformers_that_vllm_takes(
    target: TargetModel, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Older ones know our cache by another name, and ignored it."""
    requests = [Request(f"r{i}", ids, NEW_TOKENS) for i, ids in enumerate(prompts)]
    assert [done.tokens for done in decode(target, requests, None).completions] == plain


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_preempted_and_chunked_requests_get_the_targets_own_tokens(
    served: Engine, prompts: list[list[int]], plain: list[list[int]], drafter: str
) -> None:
    before = served.metric("num_preemptions")
    outputs, rounds = served.rounds(prompts, drafter, max_tokens=NEW_TOKENS)
    assert outputs == plain
    assert served.metric("num_preemptions") > before
    drafted = sum(drafted for each in rounds for drafted, _ in each)
    if drafter != "hybrid":  # which may find that nothing pays
        assert (drafted > 0) == (drafter != "none")


def test_a_prefix_from_the_cache_changes_no_draft(served: Engine) -> None:
    """A drafter whose history lies in its own cache drafts blindly behind a restored prefix."""
    draw = random.Random(1)
    prompt = [draw.randrange(3, 512) for _ in range(200)]
    fresh = served.rounds([prompt], "dlite", max_tokens=40)
    hits, asked = served.metric("prefix_cache_hits"), served.metric("prefix_cache_queries")
    again = served.rounds([prompt], "dlite", max_tokens=40)
    hits, asked = (
        served.metric("prefix_cache_hits") - hits,
        served.metric("prefix_cache_queries") - asked,
    )
    assert hits / asked > 0.9
    assert again == fresh


def test_taps_are_those_of_the_reference_model(
    served: Engine, target: TargetModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids off by one, a row off by one, or the last layer before its norm."""
    seen = served.watch_taps(monkeypatch)
    served.generate(prompts[:6], "dlite")
    assert len(seen) > 40
    wanted = target.capture([tokens[:-1] for tokens, _ in seen], DRAFT["tap_ids"])
    for (_, taps_LD), states_SLD in zip(seen, wanted, strict=True):
        reference_LD = states_SLD[-1]
        scale_L1 = reference_LD.abs().amax(-1, keepdim=True)
        assert ((taps_LD - reference_LD).abs() / scale_L1).max() < 1e-4


def test_near_the_longest_sequence_drafts_go_on_and_fit(served: Engine) -> None:
    """vLLM's own rule ends drafting for the whole batch there, and breaks on CPU."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 512) for _ in range(n)] for n in (240, 20)]
    kept = {"max_tokens": 30, "ignore_eos": True}
    plain = served.generate(prompts, "none", **kept)
    outputs, rounds = served.rounds(prompts, "ngram", **kept)
    assert outputs == plain
    assert len(outputs[0]) == 16
    assert sum(drafted for drafted, _ in rounds[1]) > 0


def test_nothing_is_left_of_a_session_behind_its_last_call(
    served: Engine, prompts: list[list[int]]
) -> None:
    from vllm import SamplingParams

    memories = served.calls.drafters["agentspec"].memories
    kept = []
    for end in (0, 1):
        extra = {"dlite_drafter": "agentspec", "dlite_session_end": end}
        asked = [
            SamplingParams(max_tokens=8, extra_args={**extra, "dlite_session_id": f"s{i}"})
            for i in range(10)
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts[:10]]
        served.llm.generate(given, asked, use_tqdm=False)
        served.generate([[5]], "none", max_tokens=1)  # the end of a call shows in the next step
        kept.append(sum(memory.num_tokens for memory in memories))
    assert kept[0] > 0 == kept[1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"dlite_drafter": "sma"}, "this server has ngram, .*, none"),
        ({"dlite_sesion_id": "a"}, "is no key of ours"),
        ({"dlite_structure": "[[1]]"}, "structure"),
    ],
)
def test_bad_metadata_is_refused_at_the_door(
    served: Engine, extra: dict[str, object], message: str
) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message):
        served.llm.generate(
            [{"prompt_token_ids": [5]}], SamplingParams(extra_args=extra), use_tqdm=False
        )
    assert served.generate([[5, 6, 7]], "ngram", max_tokens=3)
