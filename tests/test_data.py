from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlite.target import TargetModel
from train.data import Corpus, Sample, anchors, check_mask_id, load_samples, token_counts

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "tokenizer_qwen3"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A tiny random Qwen3 with the real tokenizer and chat template."""
    if not QWEN3.is_dir():
        pytest.skip("no ../shared/data/tokenizer_qwen3 here: Qwen3's goldens are not checked")
    folder = tmp_path_factory.mktemp("qwen3")
    for file in QWEN3.glob("tokenizer*.json"):
        (folder / file.name).symlink_to(file)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": [151645, 151643]}
    config = Qwen3Config(vocab_size=151936, tie_word_embeddings=True, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return TargetModel.load(str(folder))


def with_template(target: TargetModel, template: str) -> TargetModel:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return TargetModel(target.model, tokenizer, target.name)


def load(folder: Path, target: TargetModel, *rows: Any, **options: Any) -> Corpus:
    """Loads rows from a file; a row that is text is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return load_samples(file, target, **options)


def marked(sample: Sample, target: TargetModel) -> str:
    """The sample's text with supervised stretches in [[ ]]."""
    text, start = "", 0
    for end in range(1, len(sample.input_ids) + 1):
        if end == len(sample.input_ids) or sample.loss_mask[end] != sample.loss_mask[start]:
            piece = target.tokenizer.decode(sample.input_ids[start:end])
            text += f"[[{piece}]]" if sample.loss_mask[start] else piece
            start = end
    return text


def talk(*turns: str, **last: Any) -> list[dict[str, Any]]:
    """User and assistant in turn; `last` are further keys of the last message."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return [*messages[:-1], {**messages[-1], **last}]


# Goldens of real templates


def test_smollm2_supervises_every_answer_with_its_end_token_and_nothing_else(
    tmp_path: Path, smollm2: TargetModel
) -> None:
    messages = talk("Hi", "Hello!", "Bye?", "Good\n\nbye.")
    history = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    bye = "\n<|im_start|>user\nBye?<|im_end|>\n<|im_start|>assistant\n[[Good\n\nbye.<|im_end|>]]"
    (sample,) = load(tmp_path, smollm2, {"id": "a", "messages": messages}).samples
    assert marked(sample, smollm2) == history + "[[Hello!<|im_end|>]]" + bye
    (last,) = load(tmp_path, smollm2, {"messages": messages}, last_turn_only=True).samples
    assert marked(last, smollm2) == history + "Hello!<|im_end|>" + bye


def test_smollm2_leaves_out_tool_calls_so_such_rows_are_rejected(
    tmp_path: Path, smollm2: TargetModel
) -> None:
    call = {"function": {"name": "now", "arguments": "{}"}}
    lost = {"messages": talk("Time?", "", tool_calls=[call])}
    corpus = load(tmp_path, smollm2, lost, {"messages": talk("Hi", "Hello")})
    assert corpus.rejected == {"the chat template leaves out tool calls": 1}


def test_qwen3_supervises_reasoning_when_it_thinks(tmp_path: Path, qwen3: TargetModel) -> None:
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    for key in ("reasoning_content", "reasoning"):
        row = {"messages": talk("1+1?", "Two.", **{key: "One more."})}
        (sample,) = load(tmp_path, qwen3, row).samples
        assert marked(sample, qwen3) == (
            prompt + "[[<think>\nOne more.\n</think>\n\nTwo.<|im_end|>]]"
        )


def test_qwen3_without_thinking_has_the_empty_thought_in_the_prompt(
    tmp_path: Path, qwen3: TargetModel
) -> None:
    row = {"messages": talk("1+1?", "Two.")}
    (sample,) = load(tmp_path, qwen3, row, template_kwargs={"enable_thinking": False}).samples
    assert marked(sample, qwen3) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "[[Two.<|im_end|>]]"
    )


def test_qwen3_history_without_reasoning_does_not_lose_the_reasoning_of_earlier_turns(
    tmp_path: Path, qwen3: TargetModel
) -> None:
    messages = talk("1+1?", "Two.", "2+1?", "Three.", reasoning_content="Again one more.")
    messages[1]["reasoning_content"] = "One more."
    first, second = load(tmp_path, qwen3, {"id": "x", "messages": messages}).samples
    assert (first.id, second.id) == ("x#0", "x#1")
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert marked(first, qwen3) == prompt + "[[<think>\nOne more.\n</think>\n\nTwo.<|im_end|>]]"
    assert marked(second, qwen3) == (
        prompt + "Two.<|im_end|>\n<|im_start|>user\n2+1?<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\nAgain one more.\n</think>\n\nThree.<|im_end|>]]"
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_qwen3_supervises_tool_calls_and_never_tool_output(
    tmp_path: Path, qwen3: TargetModel, as_text: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add"}}
    call["function"] |= {"arguments": '{"a": [1, 2.5]}' if as_text else {"a": [1, 2.5]}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "reasoning": "Call.", "tool_calls": [call]},
        {"role": "tool", "content": "3.5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3.5", "reasoning_content": "Done."},
    ]
    row = {"messages": messages, "tools": json.dumps(tools) if as_text else tools}
    (sample,) = load(tmp_path, qwen3, row).samples
    text = marked(sample, qwen3)
    assert '"name": "add", "parameters": {}' in text.partition("[[")[0]
    assert text.partition("<|im_start|>assistant\n")[2] == (
        "[[<think>\nCall.\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": [1, 2.5]}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n3.5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nDone.\n</think>\n\n3.5<|im_end|>]]"
    )


# Rules of the mask


def test_answer_ids_are_kept_as_generated_even_where_their_text_tokenizes_otherwise(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    letters = [tiny_target.tokenizer.encode(c)[0] for c in "the"]
    assert tiny_target.tokenizer.encode("the") != letters
    row = {"messages": talk("Hi", "the"), "answer_ids": [*letters, 2], "finish_reason": "stop"}
    (sample,) = load(tmp_path, tiny_target, row).samples
    prompt = tiny_target.render(talk("Hi"))
    assert sample.input_ids == [*prompt, *letters, 2]
    assert sample.loss_mask == [False] * len(prompt) + [True] * 4


def test_an_answer_cut_by_length_has_no_end_token_to_learn(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    row = {"messages": talk("Hi", "the fox", "And?", "the dog")}
    cut, whole = ({**row, "finish_reason": reason} for reason in ("length", "stop"))
    first, second = load(tmp_path, tiny_target, cut, whole).samples
    assert second.input_ids == [*first.input_ids, 2]
    assert second.loss_mask == [*first.loss_mask, True]
    ids = tiny_target.tokenizer.encode("the dog")
    rows = [
        {"messages": talk("Hi", "the dog"), "answer_ids": ids, "finish_reason": "length"},
        {"messages": talk("Hi", "the dog"), "answer_ids": ids, "finish_reason": "stop"},
    ]
    corpus = load(tmp_path, tiny_target, *rows)
    assert marked(corpus.samples[0], tiny_target).endswith("[[the dog]]")
    assert corpus.rejected == {
        "finish_reason is stop, but answer_ids end in no end token of the target": 1
    }


def test_the_templates_own_assistant_mask_wins_and_gets_the_end_token(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
        "{%- generation -%}{{ m.content }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:\n\n{% endif %}"
    )  # its generation prompt is no prefix, so only its mask can tell
    target = with_template(tiny_target, template)
    (sample,) = load(tmp_path, target, {"messages": talk("fox", "dog", "the", "over")}).samples
    assert marked(sample, target) == (
        "user: fox<|im_end|>\nassistant:[[ dog<|im_end|>]]\n"
        "user: the<|im_end|>\nassistant:[[ over<|im_end|>]]"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ m.role }} f{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant f{% endif %}",
            "the rendered prompt is no token prefix of prompt + answer",
        ),
        (
            "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}assistant\n{% endif %}",
            "the chat template ends answers with none of the end tokens [2]",
        ),
        (
            "{{ raise_exception('no ' + messages[0].role) }}",
            "the chat template refuses it: no user",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
            "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
            "the chat template's assistant mask is empty",
        ),
    ],
)
def test_a_template_that_cannot_tell_the_answer_is_an_error_with_the_cause(
    tmp_path: Path, tiny_target: TargetModel, template: str, reason: str
) -> None:
    target = with_template(tiny_target, template)
    with pytest.raises(ValueError, match="no training samples") as caught:
        load(tmp_path, target, {"messages": talk("the", "ox")})
    assert f"1 rows rejected: 1 {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_without_a_chat_template_is_named_and_not_every_row_rejected(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    target = with_template(tiny_target, "")
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load(tmp_path, target, {"messages": talk("the", "ox")})


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
        ({"text": "Hi"}, "no messages"),
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
