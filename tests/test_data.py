from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_rows import load, marked, talk

from dlite.config import parse
from dlite.target import TargetModel
from train import rows
from train.corpus_check import Check, check
from train.counts import check_mask_id, token_counts
from train.data import Sample, anchors, load_samples
from train.presets import PRESETS, Part

ROOT = Path(__file__).parents[1]


# Rows


def test_rows_that_cannot_be_used_are_counted_by_reason_and_do_not_stop_the_run(
    tmp_path: Path, tiny_target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"id": "good", "messages": talk("Hi", "Hello")}
    narrator = [*talk("Hi", "Hello"), {"role": "narrator", "content": "He left."}]
    bad_call = {"function": {"name": "f", "arguments": "{"}}
    image = [{"type": "image_url", "image_url": {}}]
    ids = [5, 6, 7, 8]
    rows = [
        ('{"id": "torn", "messages": [{"role"', "broken JSON"),
        ("[1, 2]", "not a JSON object"),
        ({"txt": "Hi"}, "no messages"),
        ({"messages": talk("Hi")}, "no assistant turn"),
        ({"messages": narrator}, "unknown role 'narrator'"),
        ({"messages": [{"content": "Hi"}]}, "unknown role 'None'"),
        ({"messages": talk("Hi", "", tool_calls=[bad_call])}, "tool call arguments are no JSON"),
        ({"messages": [{"role": "user", "content": image}]}, "content of type 'image_url'"),
        ({"messages": talk("Hi", "Hm", reasoning="So.")}, "the chat template leaves out reasoning"),
        ({"messages": talk("Hi", "Hm"), "finish_reason": "content_filter"}, None),
        ({"messages": talk("Hi", "Hm"), "answer_ids": [512, 2]}, None),
        ({"id": "good", "messages": talk("Hi", "Hello again")}, "its id was there before"),
        ({"input_ids": ids}, "input_ids without loss_mask"),
        ({"input_ids": ids, "loss_mask": [0, 1]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": ids, "loss_mask": [0, 1, 2, 1]}, "loss_mask is not binary"),
        ({"input_ids": ids, "loss_mask": [0, 0, 0, 0]}, "no supervised tokens"),
        ({"input_ids": ids, "loss_mask": [0, 1, 0, 1]}, "no two supervised tokens in a row"),
    ]
    reasons = [reason for _, reason in rows if reason]
    reasons += ["finish_reason 'content_filter'", "a token id is outside the target's vocabulary"]
    corpus = load(tmp_path, tiny_target, good, *(row for row, _ in rows))
    assert [sample.id for sample in corpus.samples] == ["good"]
    assert corpus.rejected == dict.fromkeys(reasons, 1)
    printed = capsys.readouterr().err
    assert "1 samples" in printed
    assert all(f"1 {reason}" in printed for reason in reasons)


def test_sharegpt_and_content_parts_give_the_same_sample_as_messages(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *talk("Hi", "Hello", "Bye", "Good bye")]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    keys = ({"messages": messages}, {"conversations": messages}, {"conversations": sharegpt})
    corpus = load(tmp_path, tiny_target, *keys, {"messages": parts})
    assert len(corpus.samples) == 4
    assert len({sample.id for sample in corpus.samples}) == 4
    assert len({marked(sample, tiny_target) for sample in corpus.samples}) == 1


def test_given_ids_and_mask_are_taken_as_they_are(tmp_path: Path, tiny_target: TargetModel) -> None:
    row = {"id": 7, "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, True, 0]}
    (sample,) = load(tmp_path, tiny_target, row).samples
    assert sample == Sample("7", [5, 6, 7, 8, 9], [False, False, True, True, False])


def test_truncation_cuts_ids_and_mask_alike_and_never_beyond_the_target(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    long = {"id": "long", "input_ids": [5] * 600, "loss_mask": [0] * 10 + [1] * 590}
    late = {"id": "late", "input_ids": [5] * 40, "loss_mask": [0] * 30 + [1] * 10}
    (sample,) = (corpus := load(tmp_path, tiny_target, long, late, max_length=20)).samples
    assert sample == Sample("long", [5] * 20, [False] * 10 + [True] * 10)
    assert corpus.rejected == {"no supervised tokens within the first 20": 1}
    (sample, _) = load(tmp_path, tiny_target, long, late, max_length=1000).samples
    assert len(sample.input_ids) == len(sample.loss_mask) == tiny_target.max_length == 512


@pytest.mark.parametrize("row", [{"answer_ids": [5, 6, 2]}, {"finish_reason": "stop"}])
def test_answers_made_with_other_template_kwargs_are_refused(
    tmp_path: Path, tiny_target: TargetModel, row: dict[str, Any]
) -> None:
    row = {"id": "a", "messages": talk("Hi", "Hello"), **row}
    thinking = {"enable_thinking": True}
    with pytest.raises(ValueError, match=r"row 'a' was made with template_kwargs \{\}"):
        load(tmp_path, tiny_target, row, template_kwargs=thinking)
    with pytest.raises(ValueError, match=r"this run has \{\}"):
        load(tmp_path, tiny_target, {**row, "template_kwargs": thinking})
    row = {"messages": row["messages"], "answer_ids": [5, 6, 2], "template_kwargs": thinking}
    (sample,) = load(tmp_path, tiny_target, row, template_kwargs=thinking).samples
    assert "(thinking)\n[[" in marked(sample, tiny_target)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([""], "it holds no rows"),
        ([{"input_ids": [5, 6], "loss_mask": [0, 0]}] * 2, "2 rows rejected: 2 no supervised"),
        ([{"messages": talk("Hi")}], "1 rows rejected: 1 no assistant turn"),
    ],
)
def test_a_data_set_without_a_sample_is_one_line_with_the_cause(
    tmp_path: Path, tiny_target: TargetModel, rows: list[Any], cause: str
) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl") as caught:
        load(tmp_path, tiny_target, *rows)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_and_several_files_are_read_and_missing_ones_named(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    for name in ("b", "a"):
        row = {"id": name, "messages": talk("Hi", "Hello")}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    files = [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    assert [s.id for s in load_samples(files, tiny_target).samples] == ["b", "a"]
    assert [s.id for s in load_samples(tmp_path, tiny_target, limit=1).samples] == ["a"]
    with pytest.raises(ValueError, match=r"no file .*absent\.jsonl"):
        load_samples(tmp_path / "absent.jsonl", tiny_target)


def test_a_hub_id_that_is_not_there_is_one_line() -> None:
    code = (
        "from collections import Counter\nfrom train.rows import read_rows\n"
        "try:\n    next(read_rows('nobody/nothing', Counter()))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == 1, done.stderr
    assert done.stdout.startswith("'nobody/nothing' is no file here")


# Anchors, counts, the placeholder


def test_an_anchor_needs_a_position_before_it_and_a_supervised_successor() -> None:
    mask = [bool(x) for x in (1, 1, 0, 0, 1, 1, 1, 0, 1)]
    assert anchors(Sample("s", list(range(9)), mask), 0, 0, limit=100) == [4, 5]
    everything = Sample("s", list(range(4)), [True] * 4)
    assert anchors(everything, 0, 0, limit=100) == [1, 2]


def test_anchors_depend_on_seed_epoch_and_id_alone_in_any_process() -> None:
    sample = Sample("s", list(range(50)), [False] * 10 + [True] * 40)
    drawn = anchors(sample, 1, 2, limit=6)
    assert drawn == [10, 14, 15, 16, 23, 32]
    for other in ((Sample("t", *astuple(sample)), 1, 2), (sample, 2, 2), (sample, 1, 3)):
        assert anchors(*other, limit=6) != drawn
    code = (
        "from train.data import Sample, anchors\n"
        "mask = [False] * 10 + [True] * 40\n"
        "print(anchors(Sample('s', list(range(50)), mask), 1, 2, limit=6))\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=env, cwd=ROOT, text=True).strip() == str(drawn)


def astuple(sample: Sample) -> tuple[list[int], list[bool]]:
    return sample.input_ids, sample.loss_mask


def test_every_anchor_is_drawn_in_some_epoch() -> None:
    sample = Sample("s", list(range(20)), [True] * 20)
    drawn = {a for epoch in range(60) for a in anchors(sample, 0, epoch, limit=3)}
    assert drawn == set(range(1, 19))


def test_only_labels_are_counted_for_the_draft_vocabulary() -> None:
    samples = [
        Sample("a", [3, 3, 4, 3], [False, True, True, True]),
        Sample("b", [4, 5], [True, False]),
    ]
    assert torch.equal(token_counts(samples, 7), torch.tensor([0, 0, 0, 2, 2, 0, 0]))


@pytest.mark.parametrize(
    ("mask_id", "fault"),
    [
        (0, "is the padding id"),
        (2, "is an end token"),
        (9, "occurs in sample 'a'"),
        (512, "is outside"),
        (-1, "is outside"),
    ],
)
def test_a_placeholder_that_means_something_is_refused(
    tiny_target: TargetModel, mask_id: int, fault: str
) -> None:
    samples = [Sample("a", [7, 9, 8], [False, True, True])]
    with pytest.raises(ValueError, match=f"mask_token_id {mask_id} {fault}"):
        check_mask_id(mask_id, samples, tiny_target)
    check_mask_id(10, samples, tiny_target)


# Plain text, presets, the check


def test_plain_text_supervises_every_token_that_something_precedes(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    (sample,) = load(tmp_path, tiny_target, {"text": "the quick brown fox"}).samples
    assert marked(sample, tiny_target).count("[[") == 1
    assert sample.loss_mask == [i > 0 for i in range(len(sample.input_ids))]


def test_a_preset_streams_the_named_rows_of_each_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F7. The hub is not asked: what would be read of it is."""
    asked: list[tuple[str, str]] = []

    def hub(name: str, split: str) -> Iterator[dict[str, Any]]:
        asked.append((name, split))
        return ({"prompt": f"{name} {split} {i}"} for i in count())

    monkeypatch.setattr(rows, "_read_hub", hub)
    small = {
        name: [Part(part.hub, part.split, 3) for part in parts] for name, parts in PRESETS.items()
    }
    monkeypatch.setattr(rows, "PRESETS", small)
    assert len(list(rows.read_rows("dlite-paper", Counter()))) == 15
    assert len(set(asked)) == 5
    sizes = {name: sum(part.num_rows for part in parts) for name, parts in PRESETS.items()}
    assert sizes == {
        "open-perfectblend": 1_300_000,
        "nemotron-v2": 600_000,
        "dlite-paper": 1_900_000,
    }


def test_check_counts_what_training_would_reject(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F8."""
    lines = [
        {"id": 1, "messages": talk("Hi", "Hello there")},
        {"id": 2, "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]},
        {"id": 3, "input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"id": 4, "input_ids": [5, 6], "loss_mask": [0, 1, 1]},
        {"id": 5, "input_ids": [5, 9999], "loss_mask": [0, 1]},
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "deep" / "report.json"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n{torn")
    check(parse(Check, [f"target={tiny_folder}", f"data={file}", f"out={out}"]))
    report = json.loads(out.read_text())
    assert report["samples"] == 2
    assert report["rejected"] == dict.fromkeys(
        (
            "no supervised tokens",
            "input_ids and loss_mask differ in length",
            "a token id is outside the target's vocabulary",
            "broken JSON",
        ),
        1,
    )
    assert report["anchors_an_epoch"] == report["supervised_tokens"] - 2
    assert "1  broken JSON" in capsys.readouterr().out
