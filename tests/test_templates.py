"""Goldens of chat formats whose tokenizers are not at hand: their special tokens on a tiny one.

The templates are written after the formats' public descriptions: Llama 3 (one end token per turn)
and gpt-oss (harmony: channels, three end tokens, reasoning dropped from history).
"""

from __future__ import annotations

from pathlib import Path

from chat_rows import load, marked, talk, with_template

from dlite.target import TargetModel

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if m.thinking and loop.last and not add_generation_prompt -%}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}"
    "{%- if m.tool_calls -%}{%- set call = m.tool_calls[0].function -%}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif -%}"
    "{%- elif m.role == 'tool' -%}"
    "<|start|>functions.now to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


def speaking(target: TargetModel, template: str, tokens: list[str], ends: list[str]) -> TargetModel:
    """The tiny target with special `tokens`; `ends` end a turn, the first is the tokenizer's."""
    target = with_template(target, template)
    target.tokenizer.add_special_tokens(
        {"additional_special_tokens": tokens, "eos_token": ends[0], "bos_token": tokens[0]}
    )
    target.eos_ids = frozenset(target.tokenizer.convert_tokens_to_ids(ends))
    return target


def test_llama_3_supervises_each_answer_with_its_eot(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    tokens = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    target = speaking(tiny_target, LLAMA_3, tokens, ["<|eot_id|>"])
    (sample,) = load(tmp_path, target, {"messages": talk("Hi", "Hello!", "Bye?", " Bye. ")}).samples
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    user, answer = header.format("user"), header.format("assistant")
    assert marked(sample, target) == (
        f"<|begin_of_text|>{user}Hi<|eot_id|>{answer}[[Hello!<|eot_id|>]]"
        f"{user}Bye?<|eot_id|>{answer}[[Bye.<|eot_id|>]]"
    )


def harmony(target: TargetModel) -> TargetModel:
    tokens = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
    return speaking(target, HARMONY, tokens, ["<|return|>", "<|call|>"])


def test_harmony_supervises_reasoning_and_the_final_channel_up_to_return(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    """T1, T5: the channel headers are generated too; the analysis' own end is not the turn's."""
    target = harmony(tiny_target)
    messages = talk("1+1?", "Two.", "2+1?", "Three.", reasoning="Add.")
    first, second = load(tmp_path, target, {"id": "x", "messages": messages}).samples
    prompt = "<|start|>user<|message|>1+1?<|end|><|start|>assistant"
    assert marked(first, target) == prompt + "[[<|channel|>final<|message|>Two.<|return|>]]"
    assert marked(second, target) == (
        prompt + "<|channel|>final<|message|>Two.<|end|>"
        "<|start|>user<|message|>2+1?<|end|><|start|>assistant"
        "[[<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Three.<|return|>]]"
    )


def test_harmony_supervises_a_tool_call_up_to_call_and_never_the_tools_answer(
    tmp_path: Path, tiny_target: TargetModel
) -> None:
    target = harmony(tiny_target)
    call = {"function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        *talk("Time?", "", tool_calls=[call]),
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    (sample,) = load(tmp_path, target, {"messages": messages}).samples
    assert marked(sample, target) == (
        "<|start|>user<|message|>Time?<|end|><|start|>assistant"
        '[[ to=functions.now<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>]]'
        "<|start|>functions.now to=assistant<|channel|>commentary<|message|>12:00<|end|>"
        "<|start|>assistant[[<|channel|>final<|message|>Noon.<|return|>]]"
    )
