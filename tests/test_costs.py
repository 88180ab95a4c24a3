"""Cost tables: what stands between measured sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY_DRAFT

from dlite.costs import CostTable, measure
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel

TABLE = CostTable(
    batch_sizes=[1, 3], num_tokens=[1, 5], seconds=[[1.0, 3.0], [3.0, 5.0]], neural_seconds=[1, 2]
)


def test_times_between_sizes_are_interpolated_and_go_on_rising() -> None:
    assert TABLE.step_seconds(1, 7).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert TABLE.step_seconds(2, 3).tolist() == [2.5, 3.0]
    assert TABLE.step_seconds(2, 200)[-1] == pytest.approx(2.5 + 198 / 2)
    assert TABLE.step_seconds(64, 64).tolist() == [3.0 + 63 / 2]
    assert TABLE.draft_seconds(2) == 1.5 and TABLE.draft_seconds(9) == 2


def test_padded_steps_cost_the_next_measured_size() -> None:
    table = CostTable(batch_sizes=[1], num_tokens=[1, 4], seconds=[[1.0, 2.0]], padded=True)
    assert table.step_seconds(1, 4).tolist() == [1.0, 2.0, 2.0, 2.0]


def test_roofline_is_flat_to_the_ridge_and_linear_behind_it() -> None:
    times = CostTable.roofline(4, per_token=0.5).step_seconds(1, 20)
    assert times.tolist() == [max(1, n / 4) + 0.5 * n for n in range(1, 21)]


def test_a_written_table_reads_back(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == TABLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_sizes": [2, 2]}, r"batch_sizes are \[2, 2\]; give rising"),
        ({"num_tokens": []}, r"num_tokens are \[\]; give rising"),
        ({"seconds": [[1.0, 3.0]]}, "no table of 2 batch sizes by 2 tokens"),
        ({"neural_seconds": [1.0]}, "1 neural_seconds; give 2"),
        ({"seconds": [[0.0, 1.0], [1.0, 1.0]]}, "takes no time"),
    ],
)
def test_a_table_with_holes_is_refused(changes: dict, words: str) -> None:
    fields = {"batch_sizes": [1, 3], "num_tokens": [1, 5], "seconds": [[1.0, 3.0], [3.0, 5.0]]}
    with pytest.raises(ValueError, match=words):
        CostTable(**{**fields, **changes})


@pytest.mark.parametrize("text", ["{", '{"tokens": [1]}', "[1]"])
def test_a_file_that_holds_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs.json is no cost table"):
        CostTable.read(tmp_path / "costs.json")


def test_a_target_is_measured_with_its_draft_model(tiny_target: TargetModel) -> None:
    model = DraftModel(DraftConfig(**TINY_DRAFT))
    model.bind(tiny_target)
    table = measure(tiny_target, 2, 7, model, repeats=2)
    assert table.num_tokens == [2, 4, 8, 16]
    assert table.draft_seconds(2) > 0 and table.step_seconds(2, 16)[-1] > 0
    assert measure(tiny_target, 1, 3, repeats=1).draft_seconds(1) == 0
