"""Draft models on disk: what is written, what is read back, what is refused."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_DRAFT
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dlite import checkpoint
from dlite.checkpoint import load, read, save
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks, History
from dlite.model.vocab import vocab_maps
from dlite.target import TargetModel
from dlite.weights import read_tensors, warm_start

TRAINING = {
    "template_kwargs": {"enable_thinking": True},
    "command": "python -m train.run",
    "tau": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dlite": {"mask_token_id": 511},
    "pruned": {"head": "tied", "draft_vocab_size": 100},
    "qk_norm": {"qk_norm": True, "attention_bias": True, "head_dim": 24},
    "teacher": {"context": "taps+history", "history_window": 4, "mask_token_id": 511},
    "dspark": {
        "context": "history",
        "composition": "feature",
        "head": "markov",
        "first_predictor": "anchor",
    },
}


def build(target: TargetModel, **changes: Any) -> DraftModel:
    """A bound draft model; every value survives bfloat16, none hides behind a zero start."""
    sizes: dict[str, Any] = {
        **TINY_DRAFT,
        "num_hidden_layers": 2,
        "rope_theta": 12_345.0,
        "max_position_embeddings": target.max_length,
    }
    torch.manual_seed(0)
    model = DraftModel(DraftConfig(**{**sizes, **changes}))
    for parameter in model.parameters():
        parameter.data = (0.3 * torch.randn_like(parameter)).bfloat16().float()
    if model.config.pruned:
        counts_V = torch.arange(512) % 7
        model.set_vocabulary(*vocab_maps(counts_V, model.config.draft_vocab_size))
    return model.bind(target)


def draft(model: DraftModel) -> tuple[Tensor, Tensor]:
    """Features and drafted tokens of two anchors."""
    torch.manual_seed(1)
    layers = len(model.config.tap_ids)
    history = None
    if model.config.context != "taps":
        history = History(torch.randn(12, 3, 64), torch.tensor([5, 11]), torch.tensor([0, 6]))
    blocks = Blocks(torch.tensor([7, 300]), torch.randn(2, layers, 64), history)
    with torch.no_grad():
        return model(blocks, torch.randint(512, (2, 7))), model.draft(blocks)[0]


@pytest.fixture
def saved(tiny_target: TargetModel, tmp_path: Path) -> Path:
    model = build(tiny_target, mask_token_id=511)
    save(model, tmp_path / "draft", target=tiny_target, training=TRAINING)
    return tmp_path / "draft"


def edit(folder: Path, change: dict[str, Any], *path: str, drop: str = "") -> None:
    raw = json.loads((folder / "config.json").read_text())
    inner = raw
    for key in path:
        inner = inner[key]
    inner |= change
    inner.pop(drop, None)
    (folder / "config.json").write_text(json.dumps(raw))


# ---- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reloaded_model_drafts_bit_for_bit_as_the_saved_one(
    tiny_target: TargetModel, tmp_path: Path, variant: str
) -> None:
    model = build(tiny_target, **VARIANTS[variant])
    save(model, tmp_path, target=tiny_target, training=TRAINING)
    again = load(tmp_path, tiny_target)
    assert again.config == model.config
    for ours, theirs in zip(draft(again), draft(model), strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_that_the_target_owns_is_stored_or_trained(
    tiny_target: TargetModel, saved: Path
) -> None:
    model = load(saved, tiny_target)
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert [512, 64] not in shapes.values()
    assert shapes.keys() == dict(model.named_parameters()).keys()
    assert {file.name for file in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }


def test_loading_keeps_the_target_frozen_and_the_draft_model_trainable(
    tiny_target: TargetModel, saved: Path
) -> None:
    model = load(saved, tiny_target)
    assert not any(p.requires_grad for p in tiny_target.model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    blocks = Blocks(torch.tensor([7]), torch.randn(1, 3, 64))
    model(blocks, torch.randint(512, (1, 7))).sum().backward()
    assert tiny_target.embed_weight_VD.grad is None


def test_the_config_states_all_that_a_server_needs(tiny_target: TargetModel, saved: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    assert raw["architectures"] == ["DLiteDraftModel"] and raw["model_type"] == "dlite"
    assert raw["taps"]["layer_ids"] == [0, 1, 3] and raw["taps"]["last_layer_post_norm"] is True
    assert raw["target"].items() >= tiny_target.fingerprint().items()
    assert raw["target"]["name"] == tiny_target.name and raw["target"]["family"] == "llama"
    assert raw["max_position_embeddings"] == tiny_target.max_length
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 12_345.0
    assert raw["template_kwargs"] == {"enable_thinking": True}
    assert raw["draft"]["num_draft_tokens"] == 7 and raw["draft"]["mask_token_id"] == 511
    assert raw["draft"]["rank"] == 8 and raw["draft"]["head"] == "lowrank"
    assert raw["dtype"] == "bfloat16"
    assert read(saved).training == TRAINING


def test_the_cards_commands_are_accepted_by_the_programs(
    tiny_target: TargetModel, saved: Path
) -> None:
    from dlite.cli import parser
    from dlite.config import parse
    from eval import acceptance

    card = (saved / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", card, re.DOTALL)).replace("\\\n", " ")
    lines = [words for line in blocks.splitlines() if (words := shlex.split(line))]
    (generate,) = [words[1:] for words in lines if words[0] == "dlite"]
    assert parser().parse_args(generate).target == tiny_target.name
    (evaluate,) = [words[3:] for words in lines if words[:3] == ["python", "-m", "eval.acceptance"]]
    assert parse(acceptance.Config, evaluate).target == tiny_target.name
    assert TRAINING["command"] in card


def test_weights_in_shards_are_read(tiny_target: TargetModel, saved: Path) -> None:
    whole = read_tensors(saved)
    names = sorted(whole)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: whole[name] for name in held}, saved / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    before = draft(load(saved, tiny_target))
    (saved / "model.safetensors").unlink()
    for ours, theirs in zip(draft(load(saved, tiny_target)), before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_hub_id_is_read_from_the_local_cache(
    tiny_target: TargetModel, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub/models--someone--draft"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    saved.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint.is_checkpoint("someone/draft")
    assert load("someone/draft", tiny_target).config.tap_ids == (0, 1, 3)
    with pytest.raises(ValueError, match="draft model 'someone/other' is no folder, and no hub id"):
        load("someone/other", tiny_target)


# ---- a kill while writing --------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["save_file", "model_card"])
def test_an_interrupted_first_save_leaves_nothing(
    tiny_target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    interrupt(monkeypatch, stage)
    with pytest.raises(KeyboardInterrupt):
        save(build(tiny_target), tmp_path / "draft", target=tiny_target, training={})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(
    tiny_target: TargetModel, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = draft(load(saved, tiny_target))
    interrupt(monkeypatch, "save_file")
    with pytest.raises(KeyboardInterrupt):
        save(build(tiny_target, rank=5), saved, target=tiny_target, training={})
    monkeypatch.undo()
    assert torch.equal(draft(load(saved, tiny_target))[0], before[0])
    save(build(tiny_target, rank=5), saved, target=tiny_target, training={})
    assert load(saved, tiny_target).config.rank == 5
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def interrupt(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    original = getattr(checkpoint, stage)

    def half(*arguments: Any) -> None:
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, stage, half)


# ---- another target --------------------------------------------------------------------------


def other_target(target: TargetModel, **sizes: int) -> TargetModel:
    config = LlamaConfig(**{**target.model.config.to_dict(), **sizes})
    return TargetModel(LlamaForCausalLM(config), target.tokenizer, "other")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": 5}, "needs a target of num_layers 4, but 'other' has 5"),
        ({"vocab_size": 600}, "needs a target of vocab_size 512, but 'other' has 600"),
        ({"hidden_size": 32}, "needs a target of hidden_size 64, but 'other' has 32"),
        ({"intermediate_size": 80}, "with architecture .*, but the target 'other' has"),
    ],
)
def test_a_target_of_another_architecture_is_refused(
    tiny_target: TargetModel, saved: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(saved, other_target(tiny_target, **sizes))


def test_another_tokenizer_is_refused_naming_both(tiny_target: TargetModel, saved: Path) -> None:
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.add_tokens(["<extra>"])
    other = TargetModel(tiny_target.model, tokenizer, "revised")
    ours, theirs = (t.fingerprint()["tokenizer"] for t in (tiny_target, other))
    with pytest.raises(ValueError, match=f"with tokenizer {ours}, but .*'revised' has {theirs}"):
        load(saved, other)


def test_a_fine_tuned_target_warns_and_is_refused_when_strict(
    tiny_target: TargetModel, saved: Path
) -> None:
    tuned = TargetModel(copy.deepcopy(tiny_target.model), tiny_target.tokenizer, "tuned")
    with torch.no_grad():
        tuned.head_weight_VD.add_(1.0)
    with pytest.warns(UserWarning, match="'tuned' has weights .* fine-tuned target"):
        load(saved, tuned)
    with pytest.raises(ValueError, match="'tuned' has weights"):
        load(saved, tuned, strict=True)


def test_saving_for_a_target_of_another_size_is_refused(
    tiny_target: TargetModel, tmp_path: Path
) -> None:
    other = other_target(tiny_target, num_hidden_layers=5)
    with pytest.raises(ValueError, match="num_layers 4, but 'other' has 5"):
        save(build(tiny_target), tmp_path / "draft", target=other, training={})


# ---- broken folders --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "path", "drop", "message"),
    [
        ({}, ["draft"], "tap_ids", "no tap_ids"),
        ({}, ["draft"], "hidden_size", "incomplete draft config: .*hidden_size"),
        ({"windw": 3}, ["draft"], "", r"unknown draft config keys \['windw'\]"),
        ({"schema_version": 2}, [], "", "schema_version 2; dlite .* reads 1"),
        ({"rope_theta": 1e6}, [], "", "states rope_theta twice, as 1000000.0 and .* 12345.0"),
        ({"layer_ids": [1, 2, 4]}, ["taps"], "", "states tap ids twice"),
        ({"last_layer_post_norm": False}, ["taps"], "", "before the target's final norm"),
        ({}, ["target"], "tokenizer", "'target' must have"),
        ({"speculators_model_type": "eagle3"}, [], "draft", "describes a 'eagle3' model"),
    ],
)
def test_a_config_that_would_be_guessed_at_is_refused(
    saved: Path, change: dict[str, Any], path: list[str], drop: str, message: str
) -> None:
    edit(saved, change, *path, drop=drop)
    with pytest.raises(ValueError, match=message) as error:
        load(saved)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_readable_config_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        load(saved)
    (saved / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json is no JSON object"):
        load(saved)
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json"):
        load(saved)
    with pytest.raises(ValueError, match="draft model 'nowhere' is no folder and no hub id"):
        load("nowhere")


def test_pickles_are_never_read(saved: Path) -> None:
    weights = saved / "model.safetensors"
    tensors = read_tensors(saved)
    torch.save(tensors, weights)
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load(saved)
    weights.rename(saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model.safetensors, only pytorch_model.bin: pickles"):
        load(saved)
    (saved / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no model.safetensors; convert"):
        load(saved)


def test_a_truncated_file_is_refused(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load(saved)


@pytest.mark.parametrize(
    ("tensors", "drop", "message"),
    [
        ({}, "norm.weight", "missing norm.weight"),
        ({"norm.weight": torch.ones(7)}, "", r"norm.weight has shape \[7\], not \[64\]"),
        ({"embed_tokens.weight": torch.ones(512, 64)}, "", "unexpected embed_tokens.weight"),
        (
            {"sequential_head.state_proj.bias": torch.ones(16)},
            "",
            r"unexpected sequential_head.state_proj.bias \(biases are not supported\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    saved: Path, tensors: dict[str, Tensor], drop: str, message: str
) -> None:
    file = saved / "model.safetensors"
    changed = {**read_tensors(saved), **tensors}
    changed.pop(drop, None)
    save_file(changed, file)
    with pytest.raises(ValueError, match=message) as error:
        load(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda t: t.float(), "d2t is float32, not int64"),
        ("d2t", lambda t: t + 1, "d2t and t2d .* disagree"),
    ],
)
def test_broken_vocabulary_maps_are_refused(
    tiny_target: TargetModel, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    model = build(tiny_target, **VARIANTS["pruned"])
    save(model, tmp_path, target=tiny_target, training={})
    tensors = read_tensors(tmp_path)
    save_file({**tensors, name: change(tensors[name])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tiny_target)


# ---- one stage from another ------------------------------------------------------------------


def test_a_student_starts_from_its_teachers_shared_weights(tiny_target: TargetModel) -> None:
    teacher = build(tiny_target, **VARIANTS["teacher"])
    student = DraftModel(DraftConfig.from_dict({**teacher.config.to_dict(), "context": "taps"}))
    left = warm_start(student, teacher)
    assert left == ["history_fuse.weight", "history_norm.weight"]
    given = teacher.state_dict()
    assert all(torch.equal(tensor, given[name]) for name, tensor in student.state_dict().items())


def test_a_warm_start_copies_the_vocabulary_maps_too(tiny_target: TargetModel) -> None:
    teacher = build(tiny_target, **VARIANTS["pruned"])
    student = DraftModel(teacher.config)
    warm_start(student, teacher)
    assert torch.equal(student.draft_ids(), teacher.draft_ids())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_tokens": 5}, "num_draft_tokens is 5 in the configuration but 7"),
        ({"tap_ids": (0, 2, 3)}, r"tap_ids is \[0, 2, 3\] in the configuration but \[0, 1, 3\]"),
        ({"context": "taps+history"}, r"lacks \['history_fuse.weight', 'history_norm.weight'\]"),
    ],
)
def test_a_warm_start_from_another_model_is_refused(
    tiny_target: TargetModel, changes: dict[str, Any], message: str
) -> None:
    source = build(tiny_target, **VARIANTS["dlite"])
    model = DraftModel(DraftConfig.from_dict({**source.config.to_dict(), **changes}))
    with pytest.raises(ValueError, match=message):
        warm_start(model, source)
