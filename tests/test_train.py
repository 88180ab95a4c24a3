"""The training loop on a tiny target: resume, accumulation, states, plan, and what stops it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY_DRAFT
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch import nn

from dlite.decode import decode
from dlite.drafters.history import drafter_of
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.model.masks import Blocks
from dlite.target import TargetModel
from dlite.types import Request
from train import run as program
from train.config import TrainConfig, check
from train.data import Sample, load_samples
from train.loop import Data, Fit
from train.rollout import walk
from train.stages import compile_mlps
from train.state import latest
from train.states import LiveStates, MemoryStates

STAGES = [
    {"name": "teacher", "context": "taps+history", "loss": {"ce": 1.0}, "epochs": 1},
    {"name": "warmup", "loss": {"kl": 1.0}, "teacher": "teacher", "init": "teacher", "epochs": 1},
    {"name": "stable", "loss": {"ce": 0.1, "tv": 1.0}, "init": "warmup", "epochs": 2},
]


FEATURE = {"composition": "feature", "history_window": 0}
KINDS: dict[str, dict[str, Any]] = {
    "dlite": {},
    "dflash": {**FEATURE, "head": "none"},
    "dspark": {**FEATURE, "head": "markov", "first_predictor": "anchor"},
    "windowed": {**FEATURE, "head": "markov", "history_window": 6, "history_sinks": 2},
}


@pytest.fixture(scope="module")
def answers(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's own greedy answers to a dozen prompts."""
    chats = [[{"role": "user", "content": f"What is {i} and the dog {i}?"}] for i in range(12)]
    requests = [Request(str(i), tiny_target.render(m), 24) for i, m in enumerate(chats)]
    rows = []
    for messages, done in zip(chats, decode(tiny_target, requests, None).completions, strict=True):
        answer = {"role": "assistant", "content": tiny_target.tokenizer.decode(done.tokens)}
        row = {"id": done.request.id, "messages": [*messages, answer]}
        row |= {"answer_ids": done.tokens, "finish_reason": done.finish_reason}
        rows.append(json.dumps(row))
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture
def settings(tiny_folder: Path, answers: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "output": str(tmp_path),
        "target": {"name": str(tiny_folder)},
        "model": {"num_hidden_layers": 1, "num_taps": 3, "draft_vocab_size": -1, "rank": 8},
        "data": {"train": [str(answers)], "eval_samples": 2, "states": "memory"},
        "optim": {"batch_size": 4, "anchors_per_sample": 6, "learning_rate": 3e-3},
        "stages": STAGES,
        "save_every": 1,
        "eval_every": 2,
        "log_every": 1,
    }


def configure(settings: dict[str, Any], **changes: Any) -> TrainConfig:
    from omegaconf import OmegaConf

    merged = OmegaConf.create({**settings, **changes})
    return check(merged)  # type: ignore[arg-type]


def exported(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output) / config.name / "stages" / "stable" / "model.safetensors")


@pytest.mark.parametrize("stage", ["teacher", "warmup", "stable"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(
    settings: dict[str, Any], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = configure(settings, name="whole")
    program.train(whole)

    class Killed(Exception):
        pass

    original = Fit.step

    def dies(self: Fit, step: int) -> Any:
        if self.stage.config.name == stage and step == 2:
            raise Killed
        return original(self, step)

    broken = configure(settings, name="broken")
    monkeypatch.setattr(Fit, "step", dies)
    with pytest.raises(Killed):
        program.train(broken)
    monkeypatch.setattr(Fit, "step", original)
    found = latest(Path(broken.output) / "broken" / "state")
    assert found is not None and (found[1].stage, found[1].step) == (stage, 2)
    program.train(broken)

    for name, tensor in exported(whole).items():
        assert torch.equal(tensor, exported(broken)[name]), name
    lines = [
        (Path(c.output) / c.name / "metrics.jsonl").read_text().splitlines()
        for c in (whole, broken)
    ]
    timeless = [[_without_speed(text) for text in file] for file in lines]
    assert timeless[0] == timeless[1]


def _without_speed(text: str) -> dict[str, Any]:
    return {k: v for k, v in json.loads(text).items() if not k.endswith("_per_second")}


def test_a_resumed_run_with_other_settings_is_refused(settings: dict[str, Any]) -> None:
    program.train(configure(settings))
    with pytest.raises(ValueError, match="other settings of seed"):
        program.train(configure(settings, seed=1))


def test_accumulation_over_micro_batches_equals_one_batch(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """N14: samples of unequal supervision; a mean of means would differ."""
    gradients = []
    for micro in (0, 1, 3):
        optim = {**settings["optim"], "micro_batch_size": micro, "anchors_per_sample": 100}
        run = program.Run(configure(settings, optim=optim, stages=STAGES[:1]))
        samples = [Sample(s.id, s.input_ids, _cut(s, i)) for i, s in enumerate(run.train)]
        data = Data(samples, [], LiveStates(run.target, run.layer_ids()))
        stage = run.build(run.config.stages[0])
        fit = Fit(stage, data, run.target, run.config, run.accelerator, run.folder)
        monkeypatch.setattr(fit.optimizer, "step", lambda: None)
        monkeypatch.setattr(fit.optimizer, "zero_grad", lambda: None)
        loss = fit.step(0).loss
        gradients.append((loss, [p.grad.clone() for p in stage.parameters() if p.grad is not None]))
    for loss, grads in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-5)
        for ours, theirs in zip(grads, gradients[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def _cut(sample: Sample, i: int) -> list[bool]:
    return [on and t < len(sample.input_ids) - 3 * i for t, on in enumerate(sample.loss_mask)]


def test_states_in_memory_equal_live_states(tiny_target: TargetModel, answers: Path) -> None:
    samples = load_samples([str(answers)], tiny_target).samples
    live = LiveStates(tiny_target, (0, 2, 3))
    memory = MemoryStates(tiny_target, (0, 2, 3), samples, 1e9)
    for kept, fresh in zip(memory.get(samples), live.get(samples), strict=True):
        torch.testing.assert_close(kept, fresh, rtol=1e-4, atol=1e-5)
    row = samples[0].loss_mask.index(True) - 1
    logits = tiny_target.logits(live.get(samples[:1])[0][row, -1])
    torch.testing.assert_close(memory.log_z(samples)[0][row], logits.logsumexp(-1))


def test_states_in_memory_above_the_limit_are_refused(
    tiny_target: TargetModel, answers: Path
) -> None:
    samples = load_samples([str(answers)], tiny_target).samples
    with pytest.raises(ValueError, match=r"raise data\.states_limit_gb"):
        MemoryStates(tiny_target, (0, 3), samples, 1000)


@pytest.mark.parametrize("shape", KINDS)
def test_rollouts_along_answers_are_the_rounds_of_decoding(
    settings: dict[str, Any], tiny_target: TargetModel, answers: Path, shape: str
) -> None:
    """S1: tau in training comes from the drafter's own rollouts, and is the decoder's tau. Taps of
    four layers, so that a history of the teacher's three would not fit."""
    group = {**settings["model"], **KINDS[shape], "num_taps": 4}
    context = "taps" if shape == "dlite" else "history"
    optim = {**settings["optim"], "learning_rate": 1e-2, "anchors_per_sample": 24}
    stages = [{"name": "student", "context": context, "loss": {"ce": 1.0}, "epochs": 30}]
    quiet = {"eval_every": 1000, "save_every": 1000}
    config = configure(settings, model=group, optim=optim, stages=stages, **quiet)
    program.train(config)
    run = program.Run(config)
    model = run.load("student")
    samples = load_samples([str(answers)], tiny_target).samples
    states = LiveStates(tiny_target, run.layer_ids())
    walked = walk(model, samples, states, with_history=context == "history")
    requests = []
    for s in samples:
        first = s.loss_mask.index(True)
        requests.append(Request(s.id, s.input_ids[:first], len(s.input_ids) - first))
    decoded = decode(tiny_target, requests, drafter_of(model), batch_size=3)

    def key(r: Any) -> tuple:
        return (r.request_id, r.accepted, r.emitted, r.cut)

    rounds = [r for c in decoded.completions for r in c.rounds]
    assert sorted(map(key, walked)) == sorted(map(key, rounds))
    assert len({r.accepted for r in rounds}) >= 4  # a drafter that learnt enough to be told apart


def test_a_nan_stops_the_run_and_names_the_tensor(settings: dict[str, Any]) -> None:
    """N5."""
    run = program.Run(configure(settings))
    stage = run.build(run.config.stages[0])
    with torch.no_grad():
        stage.model.layers[0].mlp.up_proj.weight[3, 3] = torch.nan  # type: ignore[union-attr]
    fit = Fit(
        stage,
        Data(run.train, [], LiveStates(run.target, run.layer_ids())),
        run.target,
        run.config,
        run.accelerator,
        run.folder,
    )
    with pytest.raises(ValueError, match=r"step 0: loss is nan.*layers\.0\.mlp\.up_proj\.weight"):
        fit.step(0)


def test_plan_measures_and_writes_what_the_run_will_take(settings: dict[str, Any]) -> None:
    config = configure(settings, run="plan")
    program.train(config)
    folder = Path(config.output) / config.name
    plan = json.loads((folder / "plan.json").read_text())
    assert [s["steps"] for s in plan["stages"]] == [3, 3, 6]
    assert all(s["seconds_per_step"] > 0 for s in plan["stages"])
    assert not (folder / "state").exists() and not (folder / "export").exists()


def test_argmax_labels_are_the_targets_own_choice(settings: dict[str, Any]) -> None:
    """On greedy answers the target's argmax is the recorded token, so both give one loss."""
    losses = []
    for labels in ("data", "argmax"):
        stages = [{**STAGES[0], "labels": labels}]
        run = program.Run(configure(settings, stages=stages))
        stage = run.build(run.config.stages[0])
        data = Data(run.train, [], LiveStates(run.target, run.layer_ids()))
        fit = Fit(stage, data, run.target, run.config, run.accelerator, run.folder)
        losses.append(fit.step(0).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_frozen_head_is_the_teachers_to_the_last_bit(settings: dict[str, Any]) -> None:
    stages = [STAGES[0], {**STAGES[1], "freeze_head": True}]
    config = configure(settings, stages=stages)
    program.train(config)
    folder = Path(config.output) / config.name / "stages"
    teacher, student = (
        load_file(folder / name / "model.safetensors") for name in ("teacher", "warmup")
    )
    head = [name for name in student if name.startswith("sequential_head.")]
    assert head and all(torch.equal(teacher[name], student[name]) for name in head)
    moved = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(teacher[moved], student[moved])


@pytest.mark.parametrize("stage", [0, 2])
def test_activation_checkpointing_changes_no_gradient(
    settings: dict[str, Any], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for on in (False, True):
        stages = [{**STAGES[stage], "init": "random"}]
        run = program.Run(configure(settings, stages=stages, activation_checkpointing=on))
        made = run.build(run.config.stages[0])
        assert made.model.checkpointing is on
        data = Data(run.train, [], LiveStates(run.target, run.layer_ids()))
        fit = Fit(made, data, run.target, run.config, run.accelerator, run.folder)
        monkeypatch.setattr(fit.optimizer, "step", lambda: None)
        monkeypatch.setattr(fit.optimizer, "zero_grad", lambda: None)
        fit.step(0)
        gradients.append([p.grad for p in made.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_compiled_mlps_are_one_graph_each_for_every_number_of_anchors() -> None:
    from torch._dynamo.utils import counters

    model = DraftModel(DraftConfig(**{**TINY_DRAFT, "num_hidden_layers": 2}))
    model.bind(
        SimpleNamespace(  # pyright: ignore[reportArgumentType]
            embed=nn.Embedding(512, 64), head_weight_VD=torch.zeros(512, 64), num_token_ids=512
        )
    )
    compile_mlps(model, backend="eager")
    counters.clear()
    for num_anchors in (2, 3, 7, 12, 31):
        anchor_A = torch.zeros(num_anchors, dtype=torch.long)
        model.hidden(Blocks(anchor_A, torch.randn(num_anchors, 3, 64))).sum().backward()
    assert 1 <= counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"seed": "many"}, "many"),
        ({"run": "trian"}, "run is 'trian'; choose one of train, plan"),
        ({"stages": []}, "stages is empty"),
        ({"stages": [{**STAGES[1]}]}, "'teacher' is no earlier stage"),
        ({"stages": [{**STAGES[0], "loss": {}}]}, "no term"),
        ({"stages": [{**STAGES[0], "loss": {"kl": 1.0}}]}, "kl term and a teacher go together"),
        ({"stages": [STAGES[0], {**STAGES[1], "context": "history"}]}, "histories of other layers"),
    ],
)
def test_bad_configurations_name_the_key(
    settings: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        configure(settings, **changes)


@pytest.mark.parametrize("key", ["output", "data.cache"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_target_is_loaded(
    settings: dict[str, Any], tmp_path: Path, key: str
) -> None:
    """D3."""
    (tmp_path / "file").write_text("")
    config = configure(settings)
    config.target.name, config.data.states = "no target at all", "cache"
    closed = str(tmp_path / "file" / "deep" / "runs")
    if key == "output":
        config.output = closed
    else:
        config.data.cache = closed
    with pytest.raises(ValueError, match=rf"cannot make .*file/deep.*give another {key}="):
        program.train(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.nonsense=1", "unknown key 'model.nonsense'; known keys are num_hidden_layers, "),
        ("seed=many", "Value 'many' of type 'str' could not be converted to Integer"),
        ("optim.batch_size=x", "Value 'x' of type 'str' could not be converted to Integer"),
    ],
)
def test_bad_arguments_are_one_line_on_the_command_line(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([override]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    assert override.split("=")[0].split(".")[-1] in error and words in error


@pytest.mark.parametrize("file", sorted(Path("configs/experiment").glob("*.yaml")))
def test_every_experiment_composes(file: Path) -> None:
    overrides = [f"+experiment={file.stem}", "data.train=[answers.jsonl]"]
    with initialize_config_dir(program.CONFIGS, version_base="1.3"):
        config = check(compose("train", overrides))
    assert config.stages and config.target.name
