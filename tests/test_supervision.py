from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_rows import load, marked, talk, with_template
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlite.target import TargetModel

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "tokenizer_qwen3"


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
