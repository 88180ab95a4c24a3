"""Peak memory of training steps in a fresh process: prints bytes as JSON. Linux only.

memory_worker.py step VOCAB TOKENS    peak of a step above weights, gradients and moments
memory_worker.py run SETTINGS.json    peak of a whole run above what is loaded before it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor


def resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class OneSample:
    """States of a sample that no target has seen."""

    def __init__(self, states_SCD: Tensor) -> None:
        self.layer_ids: tuple[int, ...] = (0, 1, 2, 3)
        self.states_SCD = states_SCD

    def get(self, samples: object) -> list[Tensor]:
        return [self.states_SCD]

    def log_z(self, samples: object) -> None:
        return None


def step_peak(vocab_size: int, num_tokens: int) -> int:
    """A student of D = 256, 2 layers, R = 64: CE + TV over 512 anchors of one sample, K = 7."""
    from dlite.model.config import DraftConfig
    from dlite.model.drafter import DraftModel
    from dlite.model.losses import LossWeights, target_log_probs, vocab_loss
    from train.batches import assemble
    from train.data import Sample, anchors

    torch.manual_seed(0)
    config = DraftConfig(
        tap_ids=(0, 1, 2, 3),
        num_target_layers=4,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        num_hidden_layers=2,
        rank=64,
    )
    head_VD = 0.02 * torch.randn(vocab_size, 256)
    target = SimpleNamespace(
        embed=lambda ids: head_VD[ids], head_weight_VD=head_VD, num_token_ids=vocab_size
    )
    model = DraftModel(config).bind(target)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(vocab_size, (num_tokens,)).tolist()
    sample = Sample("s", ids, [t > 8 for t in range(num_tokens)])
    states = OneSample(torch.randn(num_tokens, 4, 256))
    table_V = torch.arange(vocab_size)

    def step(limit: int) -> None:
        drawn = anchors(sample, 0, 0, limit)
        batch = assemble([sample], [drawn], states, config, table_V, with_history=False)
        features = model(batch.blocks, batch.prev_AK)

        def logits(hidden: Tensor) -> Tensor:
            return hidden @ head_VD.T

        loss, _ = vocab_loss(
            features,
            model.vocab_weight(),
            batch.labels,
            LossWeights(ce=0.1, tv=1.0),
            batch.labels.weights(4.0),
            target=target_log_probs(batch.labels, logits, None, head_VD),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(2)  # gradients and moments are there from here on
    before = resident("VmRSS")
    forget_peak()
    step(512)
    return resident("VmHWM") - before


def run_peak(settings: Path) -> int:
    from omegaconf import OmegaConf

    from train.config import check
    from train.run import train

    config = check(OmegaConf.create(json.loads(settings.read_text())))  # pyright: ignore
    torch.randn(64, 64).matmul(torch.randn(64, 64))  # the math library's own buffers
    before = resident("VmRSS")
    forget_peak()
    train(config)
    return resident("VmHWM") - before


if __name__ == "__main__":
    if sys.argv[1] == "step":
        print(json.dumps(step_peak(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        print(json.dumps(run_peak(Path(sys.argv[2]))))
