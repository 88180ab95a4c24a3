"""Several processes are one: the same losses, weights and data, and no rank alone."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import save_tiny_llama
from safetensors.torch import load_file
from train_worker import Done, launch, steps

from train.distributed import check_launch
from train.state import latest

MIXED = {"name": "mixed", "context": "taps+history", "epochs": 4}
LOSS = {"ce": 0.5, "tv": 1.0, "tau": 0.1}
ZERO = Path(__file__).parents[1] / "configs" / "accelerate"

needs_deepspeed = pytest.mark.skipif(
    not find_spec("deepspeed"), reason="deepspeed is not installed: bash scripts/setup.sh test"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten training rows and two held-out ones, of unequal lengths and supervision."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    torch.manual_seed(1)
    lines = []
    for i in range(12):
        ids = torch.randint(3, 500, (12 + 7 * i,)).tolist()
        mask = [int(t > 4 and (t % 11 != 0)) for t in range(len(ids))]
        lines.append(json.dumps({"id": f"r{i}", "input_ids": ids, "loss_mask": mask}))
    file.write_text("\n".join(lines) + "\n")
    return file


def job(folder: Path, rows: Path, target: Path, **optim: Any) -> dict[str, Any]:
    """Batches of three of ten samples: in step 3 one rank of two has nothing to do."""
    return {
        "name": "job",
        "output": str(folder),
        "target": {"name": str(target), "dtype": optim.pop("dtype", "float32")},
        "model": {"num_hidden_layers": 2, "num_taps": 3, "draft_vocab_size": 300, "rank": 8},
        "data": {"train": [str(rows)], "eval_samples": 2},
        "optim": {"batch_size": 3, "anchors_per_sample": 9, "learning_rate": 1e-3, **optim},
        "stages": [{**MIXED, "loss": LOSS}],
    }


def assert_same(ours: Done, theirs: Done, tolerance: float) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance, abs=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance, abs=tolerance)
    assert ours.tau == pytest.approx(theirs.tau)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(
            tensor, theirs.weights[name], rtol=0, atol=tolerance, check_dtype=False, msg=name
        )


@pytest.mark.slow
def test_ddp_equals_one_process_with_the_same_global_batch(
    tmp_path: Path, rows: Path, tiny_folder: Path
) -> None:
    """N14, N23. The ranks' micro-batches are of other sizes than the single process's."""
    whole = job(tmp_path / "a", rows, tiny_folder, dtype="float64")
    split = job(tmp_path / "b", rows, tiny_folder, dtype="float64", micro_batch_size=1)
    one, two = steps(tmp_path / "1", whole, 1), steps(tmp_path / "2", split, 2)
    assert_same(two, one, 1e-10)
    packed = job(tmp_path / "c", rows, tiny_folder, dtype="float64", micro_batch_tokens=64)
    assert_same(steps(tmp_path / "3", packed, 2), one, 1e-10)


def zero(stage: int) -> dict[str, str]:
    """What `accelerate launch` tells its processes of a DeepSpeed configuration."""
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ZERO / f"zero{stage}.json"),
    }


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_equals_one_process_with_the_same_global_batch(
    tmp_path: Path, rows: Path, tiny_folder: Path
) -> None:
    one = steps(tmp_path / "1", job(tmp_path / "one", rows, tiny_folder), 1)
    for stage in (1, 2, 3):
        settings = job(tmp_path / f"z{stage}", rows, tiny_folder, micro_batch_size=1)
        assert_same(steps(tmp_path / f"zero{stage}", settings, 2, zero(stage)), one, 1e-6)


@pytest.mark.slow
@needs_deepspeed
def test_resume_of_a_zero3_run_that_sigterm_ended_in_its_second_stage_is_exact(
    tmp_path: Path, rows: Path, tiny_folder: Path
) -> None:
    """R10, R12. And a state of two processes is refused by one, which could not read it."""
    first = {"name": "teacher", "context": "taps+history", "max_steps": 2, "loss": {"ce": 1.0}}
    second = {"name": "student", "init": "teacher", "teacher": "teacher", "max_steps": 3}
    second["loss"] = {"ce": 0.5, "kl": 1.0, "tv": 0.5}
    settings = {**job(tmp_path, rows, tiny_folder), "stages": [first, second], "keep_states": 1}
    worker = [str(Path(__file__).parent / "train_worker.py"), "--run"]
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**settings, "name": name}))
    launch(2, [*worker, str(tmp_path / "whole.json")], environment=zero(3))
    launch(2, [*worker, str(tmp_path / "cut.json"), "student 0"], environment=zero(3))
    found = latest(tmp_path / "cut" / "state")
    assert found is not None and (found[1].stage, found[1].step) == ("student", 1)
    (alone,) = launch(1, [*worker, str(tmp_path / "cut.json")], check=False)
    assert "was written by 2 processes with deepspeed, this run has 1 with torch" in alone.stderr
    launch(2, [*worker, str(tmp_path / "cut.json")], environment=zero(3))
    whole, cut = (
        load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "cut")
    )
    assert whole.keys() == cut.keys()
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(("world", "deepspeed"), [(2, False), (1, True)])
def test_a_rank_that_believes_to_be_alone_is_refused(world: int, deepspeed: bool) -> None:
    """Without a back end accelerate starts every rank as a run of its own."""
    with pytest.raises(ValueError, match="would train on its own; launch with"):
        check_launch(Accelerator(), world, deepspeed=deepspeed)


@pytest.mark.slow
def test_two_nodes_of_two_read_disjoint_shards_that_together_are_the_epoch(
    tmp_path: Path, rows: Path, tiny_folder: Path
) -> None:
    """N23. A sample that two nodes train on, or none."""
    settings = job(tmp_path, rows, tiny_folder, batch_size=5, micro_batch_size=1)
    settings["stages"][0]["epochs"] = 1
    folder = tmp_path / "nodes"
    steps(folder, {**settings, "num_steps": 1}, 4, nodes=2)
    shards = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(4)]
    assert all(shards)
    read = [name for shard in shards for name in shard]
    assert len(read) == len(set(read)) == 10


@pytest.mark.slow
def test_ranks_with_different_targets_are_refused(
    tmp_path: Path, rows: Path, tiny_folder: Path
) -> None:
    """N26: one rank's target was fresh and random."""
    other = save_tiny_llama(tmp_path / "other", initializer_range=0.1)
    folder = tmp_path / "1"
    for rank, target in enumerate((tiny_folder, other)):
        (folder / f"rank{rank}").mkdir(parents=True)
        (folder / f"rank{rank}" / "target").symlink_to(target)
    settings = job(tmp_path, rows, Path("target"))
    (folder / "job.json").write_text(json.dumps({**settings, "own_folders": True}))
    worker = str(Path(__file__).parent / "train_worker.py")
    for done in launch(2, [worker, str(folder)], check=False):
        assert done.returncode
        assert "the target, the data or the configuration differs between processes" in done.stderr
