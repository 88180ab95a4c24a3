"""The one-sample overfit gate: train, export, reload, decode; a perfect drafter loses no token.

Anything misaligned between training and decoding (labels, taps, positions, the previous token of
the head, the export) shows as a round that does not commit K + 1 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_llama
from omegaconf import OmegaConf

import dlite.checkpoint
from dlite.decode import decode
from dlite.drafters.neural import NeuralDrafter
from dlite.target import TargetModel
from dlite.types import Request
from train import run as program
from train.config import check

ANSWER = (
    "Take the ferry at noon, then walk past the mill; two owls, a grey cat and one very old "
    "sailor guard the gate. Knock three times, say 'quartz', and hand over the brass key."
)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A tiny target trained until it answers one prompt with ANSWER."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("memorised"), initializer_range=0.05)
    target = TargetModel.load(str(folder))
    prompt = target.render([{"role": "user", "content": "How do I get in?"}])
    answer = target.tokenizer(ANSWER, add_special_tokens=False)["input_ids"] + [2]
    ids = torch.tensor([prompt + answer])
    model = target.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    model.save_pretrained(folder)
    return TargetModel.load(str(folder))


@pytest.mark.parametrize(
    "model",
    [
        {"head": "lowrank", "rank": 32},
        {"head": "tied", "draft_vocab_size": -1, "composition": "feature"},
    ],
    ids=["lowrank", "tied-pruned-feature"],
)
def test_every_round_but_the_last_commits_the_whole_block(
    memorised: TargetModel, model: dict, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "How do I get in?"}]
    request = Request("one", memorised.render(messages), 200)
    plain = decode(memorised, [request], None).completions[0]
    assert memorised.tokenizer.decode(plain.tokens, skip_special_tokens=True) == ANSWER

    rows = []
    for i in range(2):  # one to train on, one (the same) that is held out
        answer = {"role": "assistant", "content": ANSWER}
        row = {"id": str(i), "messages": [*messages, answer], "answer_ids": plain.tokens}
        rows.append(json.dumps({**row, "finish_reason": "stop"}))
    (tmp_path / "answers.jsonl").write_text("\n".join(rows))
    config = {
        "name": "overfit",
        "output": str(tmp_path),
        "target": {"name": memorised.name},
        "model": {"num_hidden_layers": 2, "num_taps": 3, **model},
        "data": {"train": [str(tmp_path / "answers.jsonl")], "eval_samples": 1, "states": "memory"},
        "optim": {"batch_size": 1, "learning_rate": 1e-2},
        "stages": [{"name": "student", "loss": {"ce": 1.0}, "epochs": 500}],
        "eval_every": 1000,
        "save_every": 1000,
    }
    program.train(check(OmegaConf.create(config)))  # type: ignore[arg-type]

    drafter = NeuralDrafter(dlite.checkpoint.load(tmp_path / "overfit" / "export", memorised))
    done = decode(memorised, [request], drafter, num_draft=7).completions[0]
    assert done.tokens == plain.tokens
    *whole, last = done.rounds
    assert [r.emitted for r in whole] == [8] * len(whole) and len(whole) >= 5
    assert last.cut
