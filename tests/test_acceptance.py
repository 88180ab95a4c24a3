"""eval.acceptance end to end on a tiny target, and the report it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_DRAFT

from dlite import checkpoint
from dlite.config import parse
from dlite.drafters.ngram import NgramDrafter
from dlite.hybrid import Hybrid
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.planner import Planner
from dlite.target import TargetModel
from eval import acceptance, report
from eval.acceptance import evaluate, make_rows
from eval.runs import PLAIN, Options, collect
from eval.suites import Item

TEXTS = ["The quick brown fox", "jumps over the lazy dog and the fox", "What is the answer?"]


def item(name: str, *texts: str) -> Item:
    return Item(name, "test", [{"role": "user", "content": text} for text in texts])


ITEMS = [item("a", TEXTS[0]), item("b", TEXTS[1], TEXTS[2]), item("c", TEXTS[2])]


@pytest.fixture(scope="module")
def draft_folder(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft model whose training used the template's thinking mode."""
    torch.manual_seed(0)
    config = DraftConfig(**TINY_DRAFT, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("draft") / "export"
    training = {"template_kwargs": {"enable_thinking": True}}
    checkpoint.save(DraftModel(config), folder, target=tiny_target, training=training)
    return folder


@pytest.fixture(scope="module")
def out(tiny_folder: Path, draft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m eval.acceptance` leaves behind."""
    folder = tmp_path_factory.mktemp("acceptance")
    suite = folder / "suite.jsonl"
    rows = [
        {"id": i.id, "category": i.id[0], "turns": [t["content"] for t in i.turns]} for i in ITEMS
    ]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"draft={draft_folder}",
        f"target={tiny_folder}",
        f"suite={suite}",
        "drafter=dlite,ngram",
        f"out={folder / 'new' / 'out'}",
        "max_new_tokens=24",
        "batch_size=2",
    ]
    acceptance.main(parse(acceptance.Config, arguments))
    return folder / "new" / "out"


def read(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    summary = json.loads((out / "summary.json").read_text())
    return summary, {row["drafter"]: row for row in summary["rows"]}


def test_result_file_lacks_what_it_takes_to_repeat_the_run(out: Path) -> None:
    summary, _ = read(out)
    assert summary["config"]["max_new_tokens"] == 24 and summary["config"]["seed"] == 0
    assert {"torch", "transformers", "dlite", "python"} <= set(summary["versions"])
    assert {"command", "commit", "device", "template_kwargs"} <= set(summary)
    assert len(summary["prompts_sha256"]) == 64
    assert {"weights", "tokenizer"} <= set(summary["target"])
    assert summary["skipped"] == []


def test_plain_decoding_is_not_measured_beside_the_drafters(out: Path) -> None:
    _, rows = read(out)
    assert list(rows) == ["plain", "dlite", "ngram"]
    plain = rows["plain"]
    assert plain["tau"] == 1.0 and plain["tau_ci95"] == [1.0, 1.0]
    assert plain["rejection_rate"] is None and plain["acceptance_by_position"] == []
    assert plain["speedup_vs_plain"] == 1.0
    assert plain["num_rounds"] == plain["num_tokens"] - plain["num_requests"]


@pytest.mark.parametrize("name", ["plain", "dlite", "ngram"])
def test_a_drafter_changes_the_output_or_its_time_does_not_add_up(out: Path, name: str) -> None:
    _, rows = read(out)
    row = rows[name]
    assert row["identical_share"] == 1.0 and row["differences"] == []
    assert row["num_requests"] == 4 and row["num_tokens"] == rows["plain"]["num_tokens"]
    parts = row["draft_seconds"] + row["verify_seconds"] + row["other_seconds"]
    assert parts == pytest.approx(row["total_seconds"])
    assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["total_seconds"])
    assert set(row["by_category"]) == {"a", "b", "c"}


def test_ngram_accepts_nothing_on_a_model_that_repeats_itself(out: Path) -> None:
    _, rows = read(out)
    ngram = rows["ngram"]
    assert ngram["tau"] > 1 and ngram["draft_seconds"] > 0
    assert ngram["accept_length"] >= ngram["tau"]
    assert 0 < ngram["acceptance_by_position"][0] <= 1


def test_rounds_of_the_requests_are_not_what_the_summary_counts(out: Path) -> None:
    _, rows = read(out)
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["id"] for r in records if r["drafter"] == "ngram"] == ["a", "b/1", "b/2", "c"]
    for name, row in rows.items():
        mine = [r for r in records if r["drafter"] == name]
        rounds = [x for r in mine for x in r["rounds"]]
        emitted = [n for _, _, n, _, _ in rounds]
        assert sum(emitted) / len(rounds) == pytest.approx(row["tau"])
        assert sum(len(r["tokens"]) for r in mine) == row["num_tokens"]
        assert sum(emitted) == row["num_tokens"] - row["num_requests"]


def test_other_thinking_mode_than_in_training_goes_unnoticed(out: Path) -> None:
    _, rows = read(out)
    (warning,) = rows["dlite"]["warnings"]
    assert "{'enable_thinking': True}, this run uses {}" in warning
    assert rows["ngram"]["warnings"] == []


def test_same_template_arguments_or_a_fine_tuned_target_are_warned_about_wrongly(
    draft_folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config = acceptance.Config(
        target="",
        out="",
        suite=[],
        drafter=["dlite"],
        draft=str(draft_folder),
        template_kwargs={"enable_thinking": True},
    )
    target = TargetModel.load(str(tiny_folder))
    assert acceptance.build(config, target)[1] == {"dlite": []}
    with torch.no_grad():
        target.head_weight_VD.mul_(1.5)
    (warning,) = acceptance.build(config, target)[1]["dlite"]
    assert "a fine-tuned target?" in warning


def test_report_needs_another_file_or_the_network(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page) == []
    assert "http" not in page.lower() and "<script" not in page
    assert page.count("<figure>") == 5
    assert "identical to plain" in page


def test_second_turn_does_not_see_the_targets_own_first_answer(tiny_target: TargetModel) -> None:
    runs = collect(tiny_target, {"ngram": NgramDrafter()}, ITEMS, Options(max_new_tokens=8))
    for records in runs.records.values():
        first, second = (r for r in records if r.request.id.startswith("b/"))
        text = tiny_target.tokenizer.decode(first.tokens, skip_special_tokens=True)
        messages = [
            ITEMS[1].turns[0],
            {"role": "assistant", "content": text},
            ITEMS[1].turns[1],
        ]
        assert second.request.prompt == tiny_target.render(messages)


def test_template_arguments_do_not_reach_the_prompt(tiny_target: TargetModel) -> None:
    options = Options(max_new_tokens=2, template_kwargs={"enable_thinking": True})
    (record,) = collect(tiny_target, {}, ITEMS[:1], options).records[PLAIN]
    assert record.request.prompt == tiny_target.render(ITEMS[0].turns, enable_thinking=True)
    assert record.request.prompt != tiny_target.render(ITEMS[0].turns)


def test_a_changed_output_is_not_found_or_its_margin_is_of_another_position(
    tiny_target: TargetModel,
) -> None:
    options = Options(max_new_tokens=8)
    drafters = {"ngram": NgramDrafter()}
    runs = collect(tiny_target, drafters, ITEMS, options)
    plain = runs.records[PLAIN][0]
    changed = [*plain.tokens[:3], (plain.tokens[3] + 1) % 512, *plain.tokens[4:]]
    runs.records["ngram"][0] = replace(runs.records["ngram"][0], tokens=changed)
    row = make_rows(tiny_target, drafters, runs, options)[1]
    assert row.identical_share == 3 / 4
    (difference,) = row.differences
    assert (difference.id, difference.position) == ("a", 3)
    ids = torch.tensor([[*plain.request.prompt, *plain.tokens[:3]]])
    with torch.no_grad():
        best = tiny_target.model(ids).logits[0, -1].topk(2)
    assert int(best.indices[0]) == plain.tokens[3]
    margin = float(best.values[0] - best.values[1])
    assert difference.top2_margin == pytest.approx(margin, abs=1e-3)


def test_sampled_outputs_are_compared_with_plain_ones_or_not_repeatable(
    tiny_target: TargetModel,
) -> None:
    options = Options(max_new_tokens=8, temperature=1.0, seed=5)
    drafters = {"ngram": NgramDrafter()}
    rows = evaluate(tiny_target, drafters, ITEMS[:1], options)
    assert [row.identical_share for row in rows] == [None, None]
    tokens = [
        collect(tiny_target, {}, ITEMS[:1], replace(options, seed=seed)).records[PLAIN][0].tokens
        for seed in (5, 5, 6)
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_prompts_too_long_for_the_target_stop_the_run_or_vanish(tiny_target: TargetModel) -> None:
    long = " ".join(map(str, range(200)))
    items = [item("long", long), item("late", TEXTS[0], long, TEXTS[2]), ITEMS[0]]
    options = Options(max_new_tokens=4)
    runs = collect(tiny_target, {}, items, options)
    assert [r.request.id for r in runs.records[PLAIN]] == ["late/1", "a"]
    assert [name for name, _ in runs.skipped] == ["long", "late/2"]
    assert runs.skipped[0][1] == len(tiny_target.render(items[0].turns)) > 512 - 4
    with pytest.raises(ValueError, match=r"prompt 'long' has \d+ tokens.*too_long=skip"):
        collect(tiny_target, {}, items, replace(options, too_long="error"))
    with pytest.raises(ValueError, match="every prompt is too long"):
        collect(tiny_target, {}, items[:1], options)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("drafter=ngram,eagle", "unknown drafter 'eagle'; choose from dlite, ngram"),
        ("max_tokens=3", "unknown key 'max_tokens'; known keys are"),
        ("too_long=cut", "too_long is 'cut'; choose skip or error"),
        ("batch_size=0", "batch_size is 0; give at least 1"),
        ("temperature=-1", "temperature is -1.0; give a number >= 0"),
    ],
)
def test_a_bad_argument_is_found_only_after_the_target_was_loaded(
    argument: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(acceptance.Config, ["target=x", "suite=y", "out=z", argument])
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_found_only_after_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "results")
    with pytest.raises(ValueError, match=re.escape(f"cannot make {out}: Not a directory; give")):
        acceptance.main(acceptance.Config(target="x", suite=["y"], out=out, drafter=["ngram"]))


def test_dlite_without_a_draft_model_is_a_crash() -> None:
    with pytest.raises(ValueError, match="drafter dlite needs a draft model; add draft=DIR"):
        acceptance.Config(target="x", suite=["y"], out="z", drafter=["dlite"])


def test_hybrid_plans_for_other_sizes_or_changes_the_output(
    tiny_target: TargetModel, draft_folder: Path
) -> None:
    config = acceptance.Config(
        target=tiny_target.name,
        suite=["x"],
        out="y",
        drafter=["hybrid"],
        draft=str(draft_folder),
        batch_size=2,
        max_new_tokens=24,
    )
    drafters, _ = acceptance.build(config, tiny_target)
    plain, hybrid = evaluate(tiny_target, drafters, ITEMS, config)
    assert hybrid.identical_share == 1.0 and hybrid.num_tokens == plain.num_tokens
    found = drafters["hybrid"]
    assert isinstance(found, Hybrid) and isinstance(found.chooser, Planner)
    assert found.chooser.costs is not None
    assert found.chooser.costs.batch_sizes == [2] and found.chooser.costs.num_tokens[-1] == 16


def test_report_program_merges_results_and_training(out: Path, tmp_path: Path) -> None:
    lines = [
        {"stage": stage, "step": step, **values}
        for stage in ("teacher", "stable")
        for step, values in ((1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"tau": 1.25}))
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "report.html"
    arguments = [f"inputs={out},{out}/summary.json", f"out={page}", f"metrics={metrics}"]
    report.main(parse(report.Config, arguments))
    text = page.read_text()
    assert text.count("<h2>Acceptance") == 2 and "<h2>Training</h2>" in text
    assert text.count("<figure>") == 5 + 5 + 2 and "<td>1.25</td>" in text


def test_report_on_something_else_is_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result file"):
        report.read_summary(str(tmp_path))
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no result of eval\.acceptance or eval\.latency"):
        report.read_summary(str(tmp_path))
    with pytest.raises(ValueError, match="no metrics file"):
        report.read_metrics(str(tmp_path / "metrics.jsonl"))
