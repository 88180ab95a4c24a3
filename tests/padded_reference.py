"""The plain training step: samples padded to the longest, all logits at once. Slow and obvious.

`python tests/padded_reference.py` times it against the packed and chunked one (docs/train.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.losses import Labels, LossWeights, combine, row_terms
from dlite.model.masks import Blocks
from dlite.target import TargetModel
from train.data import Sample

LENGTHS = (96, 128, 128, 160, 200, 256, 320, 400, 64, 512, 96, 700, 150, 1024, 220, 90)
LOSS = LossWeights(ce=0.1, tv=1.0)


def padded_states(target: TargetModel, samples: Sequence[Sample], layer_ids: tuple) -> Tensor:
    """[B, longest, L, D], one forward over all samples, garbage behind each one's end."""
    tokens_BT = target.pad([s.input_ids for s in samples])
    with torch.no_grad():
        taps = target._run(tokens_BT, [0] * len(samples), layer_ids, use_cache=False).taps_BTLD
    assert taps is not None
    return taps


def padded_loss(
    model: DraftModel,
    target: TargetModel,
    samples: Sequence[Sample],
    anchors: Sequence[Sequence[int]],
    loss: LossWeights,
    gamma: float = 4.0,
) -> Tensor:
    """The loss of one step. Each sample has as many anchor rows as the richest one."""
    config = model.config
    layer_ids = tuple(sorted({*config.tap_ids, target.num_layers - 1}))
    column = {k: i for i, k in enumerate(layer_ids)}
    states_BSLD = padded_states(target, samples, layer_ids)
    num_K, most = config.num_draft_tokens, max(len(drawn) for drawn in anchors)
    parts: dict[str, list[Tensor]] = {n: [] for n in ("anchor", "prev", "label", "valid", "p")}
    taps = []
    for sample, drawn, states_SLD in zip(samples, anchors, states_BSLD, strict=True):
        for i in range(most):
            a = drawn[i] if i < len(drawn) else 1
            supervised, rows = i < len(drawn), []
            for k in range(1, num_K + 1):
                t = min(a + k, len(sample.input_ids) - 1)
                inside = a + k < len(sample.input_ids)
                supervised = supervised and inside and sample.loss_mask[t]
                rows.append((sample.input_ids[t - 1], sample.input_ids[t], supervised, t - 1))
            taps.append(states_SLD[a - 1, [column[k] for k in config.tap_ids]])
            parts["anchor"].append(torch.tensor(sample.input_ids[a]))
            for name, values in zip(("prev", "label", "valid"), zip(*rows, strict=True)):  # noqa: B905
                parts[name].append(torch.tensor(values))
            last_KD = states_SLD[[row[3] for row in rows], column[target.num_layers - 1]]
            parts["p"].append(last_KD)
    made = {name: torch.stack(values) for name, values in parts.items()}
    labels = Labels(made["label"], made["label"], made["valid"].bool(), made["p"])
    features_AKF = model(Blocks(made["anchor"], torch.stack(taps)), made["prev"])
    logits_NV = features_AKF.flatten(0, 1) @ model.vocab_weight().T
    log_p_NV = target.logits(labels.state_AKD.flatten(0, 1)).log_softmax(-1)
    terms = row_terms(logits_NV, labels.draft_label_AK.flatten(), log_p_NV, None)
    return combine(terms, loss, labels.decay(gamma), labels.weights(gamma))


def made_of(lengths: Sequence[int], vocab_size: int) -> list[Sample]:
    """Samples whose second half is supervised."""
    torch.manual_seed(1)
    return [
        Sample(
            f"s{i}", torch.randint(3, vocab_size, (n,)).tolist(), [t >= n // 2 for t in range(n)]
        )
        for i, n in enumerate(lengths)
    ]


def benchmark() -> None:
    from train.config import ModelConfig, StageConfig, TrainConfig
    from train.data import anchors
    from train.loop import Data, Fit
    from train.stages import Stage, build_model, draft_config
    from train.states import LiveStates

    target = TargetModel.load("smollm2-135m")
    samples = made_of(LENGTHS, 49000)
    draft: DraftConfig = draft_config(target, ModelConfig(num_hidden_layers=2, num_taps=6), [])
    drawn = [anchors(s, 0, 0, 64) for s in samples]
    total = sum(map(len, drawn))

    def fresh() -> DraftModel:
        return build_model(draft, target, torch.ones(target.vocab_size), "random", 0)

    from accelerate import Accelerator

    from train.config import LossConfig, OptimConfig

    stage_config = StageConfig("s", loss=LossConfig(ce=0.1, tv=1.0))
    optim = OptimConfig(
        batch_size=len(samples), anchors_per_sample=64, micro_batch_tokens=2048, learning_rate=0.0
    )
    config = TrainConfig("bench", stages=[stage_config], optim=optim)
    stage = Stage(stage_config, fresh(), target, None, 4.0)
    layers = tuple(sorted({*draft.tap_ids, target.num_layers - 1}))
    data = Data(samples, [], LiveStates(target, layers))
    fit = Fit(stage, data, target, config, Accelerator(), None)  # type: ignore[arg-type]
    model = fresh()
    best = {"padded, eager": 9e9, "packed, chunked": 9e9}
    for turn in range(3):
        began = time.perf_counter()
        padded_loss(model, target, samples, drawn, LOSS).backward()
        best["padded, eager"] = min(best["padded, eager"], time.perf_counter() - began)
        began = time.perf_counter()
        fit.step(turn)
        best["packed, chunked"] = min(best["packed, chunked"], time.perf_counter() - began)
        model.zero_grad()
    for name, seconds in best.items():
        print(f"{name}: {total / seconds:.0f} anchors/s ({total} anchors in {seconds:.1f} s)")


if __name__ == "__main__":
    benchmark()
