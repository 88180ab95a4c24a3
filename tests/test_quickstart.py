"""The quickstart's chain, the README's example and its commands, on a tiny random target."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import dlite.cli
from dlite.config import parse
from eval import acceptance, quickstart_summary
from train import regenerate
from train.run import main as train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chain(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/` and `results/` as scripts/quickstart.sh leaves them."""
    top = tmp_path_factory.mktemp("quickstart")
    for name, num_prompts in (("train", 12), ("heldout", 4)):
        rows = [{"id": f"{name}-{k}", "prompt": f"The {name} {k} fox?"} for k in range(num_prompts)]
        (top / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate.regenerate(
        regenerate.Config(
            prompts=[str(top / "train.jsonl")],
            out=str(top / "answers.jsonl"),
            target=str(tiny_folder),
            max_new_tokens=24,
        )
    )
    overrides = ["model.num_taps=4", "data.eval_samples=2", "optim.batch_size=5", "eval_every=3"]
    overrides += [f"stages.{k}.epochs=2" for k in range(3)]
    overrides += [f"target.name={tiny_folder}", f"output={top}/runs"]
    answers = f"data.train=[{top}/answers.jsonl]"
    assert train(["+experiment=quickstart", "name=quickstart", answers, *overrides]) == 0
    for out in ("heldout", "spec_bench"):
        acceptance.main(
            acceptance.Config(
                target=str(tiny_folder),
                draft=str(top / "runs/quickstart/export"),
                suite=[str(top / "heldout.jsonl")],
                drafter=["dlite", "ngram"],
                max_new_tokens=16,
                out=str(top / "results" / out),
            )
        )
    arguments = [f"run={top}/runs/quickstart", f"results={top}/results", "seconds=61"]
    quickstart_summary.main(parse(quickstart_summary.Config, arguments))
    return top


def test_summary_states_the_figures_of_the_evaluations_and_of_the_last_line_of_each_stage(
    chain: Path,
) -> None:
    merged = json.loads((chain / "results/summary.json").read_text())
    for found, name in ((merged, "heldout"), (merged["spec_bench"], "spec_bench")):
        rows = json.loads((chain / "results" / name / "summary.json").read_text())["rows"]
        assert found["tau"] == {row["drafter"]: row["tau"] for row in rows}
        assert found["tokens_per_second"] == {r["drafter"]: r["tokens_per_second"] for r in rows}
        assert found["identical_share"] == dict.fromkeys(("plain", "dlite", "ngram"), 1.0)
    assert merged["tau"]["plain"] == 1.0
    assert merged["seconds"] == 61
    lines = (chain / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    evaluations = [line for text in lines if "tau" in (line := json.loads(text))]
    assert list(merged["tau_by_stage"]) == ["teacher", "warmup", "stable"]
    for stage, tau in merged["tau_by_stage"].items():
        steps = {line["step"]: line["tau"] for line in evaluations if line["stage"] == stage}
        assert len(steps) > 1
        assert tau == steps[max(steps)]


def test_the_report_shows_both_suites_and_the_stages_and_needs_no_other_file(chain: Path) -> None:
    page = (chain / "results/report.html").read_text()
    assert page.count("<h2>Acceptance on") == 2
    assert "tau at its end" in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []


def test_without_spec_bench_the_summary_is_of_the_held_out_prompts_alone(
    chain: Path, tmp_path: Path
) -> None:
    (tmp_path / "heldout").symlink_to(chain / "results/heldout")
    config = quickstart_summary.Config(
        run=str(chain / "runs/quickstart"), results=str(tmp_path), seconds=1
    )
    merged, summaries = quickstart_summary.quickstart_summary(config)
    assert "spec_bench" not in merged
    assert len(summaries) == 1


def test_the_readme_example_runs(
    chain: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    example = example.replace("runs/", f"{chain}/runs/").replace("smollm2-135m", str(tiny_folder))
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"^\d+\.\d\d tokens per forward of the target$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("command", re.findall(r"^dlite .*$", README, re.M))
def test_the_readme_commands_run(command: str, chain: Path, tiny_folder: Path) -> None:
    command = command.replace("runs/", f"{chain}/runs/").replace("smollm2-135m", str(tiny_folder))
    assert dlite.cli.main(shlex.split(command)[1:]) == 0
