"""The command line, mostly in-process; what depends on a fresh interpreter in a subprocess."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import TINY_DRAFT

from dlite.checkpoint import load, read, save
from dlite.cli import main, parser
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel

ROOT = Path(__file__).parents[1]
PROMPT = ["--prompt", "The quick brown fox", "--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def draft_folder(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = DraftConfig(**TINY_DRAFT, num_hidden_layers=1, mask_token_id=511)
    folder = tmp_path_factory.mktemp("cli") / "draft"
    training = {"template_kwargs": {"enable_thinking": True}, "command": "python -m train.run"}
    model = DraftModel(config).bind(tiny_target)
    save(model, folder, target=tiny_target, training=training, dtype=torch.float32)
    return folder


def fails(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line that a failing command writes."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dlite: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


# ---- start -----------------------------------------------------------------------------------


def test_help_and_import_load_no_framework() -> None:
    code = (
        "import sys, dlite, dlite.cli\n"
        "try: dlite.cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--temperature" in done.stdout
    assert done.stdout.splitlines()[-1] == ""


def actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions(command)


def test_every_boolean_flag_can_be_switched_off() -> None:
    flags = [a for a in actions(parser()) if a.nargs == 0 and a.dest != "help"]
    assert {a.dest for a in flags} >= {"chat", "strict", "overwrite", "debug"}
    for flag in flags:
        assert any(option.startswith("--no-") for option in flag.option_strings), flag.dest


def test_a_fresh_process_answers_standard_input_and_reports_in_one_line(
    tiny_target: TargetModel, draft_folder: Path
) -> None:
    command = [sys.executable, "-m", "dlite.cli", "generate", tiny_target.name]
    options = ["--draft", str(draft_folder), "--max-new-tokens", "16"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, input="The quick brown"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "tau 1." in done.stderr and "acceptance" in done.stderr
    assert len(done.stderr.splitlines()) == 1, "nothing but the figures goes to stderr"


# ---- generate --------------------------------------------------------------------------------


def test_every_drafter_gives_the_same_greedy_text(
    tiny_target: TargetModel, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = set()
    same_prompt = ["--template-kwargs", '{"enable_thinking": true}']
    model = ["--draft", str(draft_folder)]
    for drafter in (
        ["--drafter", "none"],
        ["--drafter", "ngram"],
        model,
        ["--drafter", "survival"],
        ["--drafter", "hybrid"],
        ["--drafter", "hybrid", *model],
    ):
        assert main(["generate", tiny_target.name, *PROMPT, *same_prompt, *drafter]) == 0
        out, err = capsys.readouterr()
        texts.add(out)
        if drafter[1] != "hybrid":  # whose planner may find that no draft pays
            assert ("acceptance" in err) == (drafter[1] != "none"), err
        assert "tau" in err and "tokens/s" in err
    (text,) = texts
    assert text.strip()


def test_text_is_shown_as_it_is_decoded(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        shown: ClassVar[list[str]] = []

        def flush(self) -> None:
            if self.getvalue() not in self.shown:
                self.shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    assert main(["generate", tiny_target.name, *PROMPT, "--drafter", "none"]) == 0
    assert len(Screen.shown) > 8, "about one piece per token"


def test_the_template_arguments_of_the_training_are_used_and_others_warn(
    tiny_target: TargetModel, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", tiny_target.name, *PROMPT, "--draft", str(draft_folder)]
    outputs = []
    for kwargs in ([], ["--template-kwargs", "{}"]):
        assert main([*command, *kwargs]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out != outputs[1].out
    assert "warning" not in outputs[0].err
    assert "warning: --template-kwargs {} differ from {'enable_thinking': True}" in outputs[1].err


def test_a_seed_repeats_sampled_text_and_another_changes_it(
    tiny_target: TargetModel, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", tiny_target.name, *PROMPT, "--draft", str(draft_folder)]
    sampled = ["--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--seed"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*command, *sampled, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_without_chat_the_prompt_is_continued_as_it_stands(
    tiny_target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for chat in ("--chat", "--no-chat"):
        assert main(["generate", tiny_target.name, *PROMPT, chat]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "dlite"], "--drafter dlite needs a draft model; add --draft DIR"),
        (["--drafter", "ngram", "--draft", "DRAFT"], "--drafter ngram has no use for --draft"),
        (["--draft", "nowhere"], "draft model 'nowhere' is no folder and no hub id"),
        (["--prompt", " "], "the prompt is empty"),
        (["--temperature", "-1"], "temperature is -1.0; give a number >= 0"),
        (["--top-p", "0"], "top_p is 0.0; give"),
        (["--device", "tpu"], "--device is 'tpu', and this machine has"),
        (["--dtype", "int8"], "dtype is 'int8'; choose one of"),
        (["--max-new-tokens", "100000"], "exceeds the 512"),
        (["--max-new-tokens", "0"], "max_new_tokens 0; both must be at least 1"),
        (["--draft", "DRAFT", "--num-draft", "9"], "--num-draft is 9; .* trained for 7"),
        (["--num-draft", "0"], "--num-draft is 0; give at least 1, or --drafter none"),
    ],
)
def test_bad_input_is_one_line_that_names_value_and_remedy(
    tiny_target: TargetModel,
    draft_folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    options = [str(draft_folder) if option == "DRAFT" else option for option in options]
    err = fails(capsys, "generate", tiny_target.name, *PROMPT, *options)
    assert re.search(message, err), err


def test_an_unknown_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'nowhere'" in fails(capsys, "generate", "nowhere", *PROMPT)


def test_debug_shows_where_an_error_arose() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        main(["generate", "nowhere", *PROMPT, "--debug"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--prompt", "a", "--temprature", "1"], "--temprature"),
        (["generate", "x", "--template-kwargs", "{"], "--template-kwargs"),
        (["export", "a", "b"], "--to"),
        (["serve"], "serve"),
        ([], "COMMAND"),
    ],
)
def test_a_misspelt_argument_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and message in err


# ---- inspect, export -------------------------------------------------------------------------


def inspected(capsys: pytest.CaptureFixture[str], name: str | Path) -> dict[str, str]:
    assert main(["inspect", str(name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {key: value.strip() for key, _, value in (line.partition("  ") for line in lines)}


def test_inspect_tells_what_a_draft_model_is(
    tiny_target: TargetModel, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = inspected(capsys, draft_folder)
    assert lines["kind"] == "draft model, dlite layout, float32"
    assert lines["tap_ids"] == "[0, 1, 3]" and lines["target"] == tiny_target.name
    parameters = sum(p.numel() for p in load(draft_folder).parameters())
    assert lines["parameters"] == f"{parameters:,}"
    for key, value in tiny_target.fingerprint().items():
        assert lines[f"target {key}"] == value
    assert lines["torch"] == torch.__version__ and "gpu" in lines and "vllm" in lines


def test_inspect_tells_what_a_target_is(
    tiny_target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = inspected(capsys, tiny_target.name)
    assert lines["kind"] == "target" and lines["layers"] == "4" and lines["family"] == "llama"
    assert lines["weights"] == tiny_target.fingerprint()["weights"]


def test_an_export_to_the_authors_layout_and_back_keeps_every_bit(
    tiny_target: TargetModel, draft_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert main(["export", str(draft_folder), str(theirs), "--to", "authors"]) == 0
    target = ["--target", tiny_target.name]
    assert main(["export", str(theirs), str(ours), "--to", "dlite", *target]) == 0
    assert "wrote" in capsys.readouterr().out
    assert "dlite_config" in json.loads((theirs / "config.json").read_text())
    assert read(ours).target == read(draft_folder).target
    again = load(ours).state_dict()
    for name, tensor in load(draft_folder).state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_a_rewritten_checkpoint_keeps_its_target_and_its_training(
    draft_folder: Path, tmp_path: Path
) -> None:
    assert main(["export", str(draft_folder), str(tmp_path / "copy"), "--to", "dlite"]) == 0
    assert read(tmp_path / "copy").target == read(draft_folder).target
    assert read(tmp_path / "copy").training == read(draft_folder).training


def test_an_export_overwrites_only_when_told(
    draft_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    command = ["export", draft_folder, tmp_path, "--to", "dlite"]
    assert "not empty; choose another folder, or --overwrite" in fails(capsys, *command)
    assert main([*map(str, command), "--overwrite"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert read(tmp_path).layout == "dlite"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "sglang"], "there is no plugin for sglang; serve with vLLM: --to vllm"),
        (["--to", "dlite"], "--to dlite writes a folder; name it"),
    ],
)
def test_an_export_that_cannot_be_made_says_so(
    draft_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in fails(capsys, "export", draft_folder, *options)


def test_a_draft_model_of_a_broken_file_is_one_line(
    draft_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((draft_folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    err = fails(capsys, "export", tmp_path, tmp_path / "out", "--to", "dlite")
    assert "pytorch_model.bin: pickles run code and are never read" in err
