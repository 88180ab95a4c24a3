"""From a conversation to token ids and a loss mask: what the target would generate, no more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from train.rows import Chat, Rejected

if TYPE_CHECKING:
    from dlite.target import TargetModel

REASONING_KEYS = ("reasoning_content", "thinking")
Masked = tuple[list[int], list[bool]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def supervise(
    target: TargetModel,
    chat: Chat,
    template_kwargs: dict[str, Any],
    *,
    last_turn_only: bool = False,
    cut: bool = False,
) -> list[Masked]:
    """Ids and loss masks that supervise each assistant turn as the target generates it.

    A turn is rendered as the last one of its conversation, so that its reasoning is there.
    Turns whose renderings continue one another share one sequence; where a template renders
    history otherwise (it drops old reasoning), a new one begins. `cut` says that the last answer
    met the length limit: it has no end token. Raises Rejected.
    """
    kwargs = chat.kwargs(template_kwargs)
    messages = _reasoning_as_read(chat.messages, target.tokenizer.chat_template)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise Rejected("no assistant turn")
    sequences: list[Masked] = []
    for i in turns[-1:] if last_turn_only else turns:
        upto = messages[: i + 1]
        ids, mask = _turn(target, upto, kwargs)
        ids, mask = _as_generated(ids, mask, target.eos_ids, cut=cut and i == turns[-1])
        if sequences:
            before_ids, before_mask = sequences[-1]
            if ids[: len(before_ids)] == before_ids and not any(mask[: len(before_ids)]):
                mask[: len(before_mask)] = before_mask
                sequences.pop()
        sequences.append((ids, mask))
    return sequences


def _reasoning_as_read(messages: list[dict[str, Any]], template: Any) -> list[dict[str, Any]]:
    """Reasoning under the name that the template reads: gpt-oss's reads `thinking`."""
    usual, other = REASONING_KEYS
    if f".{other}" not in str(template) or usual in str(template):
        return messages
    return [{other if k == usual else k: v for k, v in m.items()} for m in messages]


def _turn(target: TargetModel, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> Masked:
    """The rendering of `messages`, the last of which is an assistant's, masked to that turn.

    By the template's own assistant mask if it has one, else by the prompt's rendering, which must
    then be a true prefix: a tokenizer may merge text across the border.
    """
    history = messages[:-1]
    ids = render(target.render, messages, add_generation_prompt=False, **kwargs)
    _check_nothing_dropped(target, messages, ids, kwargs)
    if GENERATION.search(target.tokenizer.get_chat_template(tools=kwargs.get("tools"))):
        mask = _assistant_mask(target, messages, ids, kwargs)
        before = render(target.render, history, add_generation_prompt=False, **kwargs)
        same = next((k for k, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), None)
        start = len(before) if same is None else same
        return ids, [on and k >= start for k, on in enumerate(mask)]
    prompt = render(target.render, history, add_generation_prompt=True, **kwargs)
    if ids[: len(prompt)] != prompt:
        raise Rejected("the rendered prompt is no token prefix of prompt + answer")
    return ids, [k >= len(prompt) for k in range(len(ids))]


def _assistant_mask(
    target: TargetModel, messages: list[dict[str, Any]], ids: list[int], kwargs: dict[str, Any]
) -> list[bool]:
    made = target.tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    assert made["input_ids"] == ids
    return [bool(value) for value in made["assistant_masks"]]


def _as_generated(
    ids: list[int], mask: list[bool], eos_ids: frozenset[int], *, cut: bool
) -> Masked:
    """Ends at the turn's end token, supervised unless the answer was cut before it.

    What templates write behind it (a newline) is never generated.
    """
    if True not in mask:
        raise Rejected("the chat template's assistant mask is empty")
    start = mask.index(True)
    end = next((k for k in range(start, len(ids)) if ids[k] in eos_ids), None)
    if end is None:
        raise Rejected(
            f"the chat template ends answers with none of the end tokens {sorted(eos_ids)}"
        )
    return (ids[:end], mask[:end]) if cut else (ids[: end + 1], [*mask[:end], True])


def _check_nothing_dropped(
    target: TargetModel, messages: list[dict[str, Any]], ids: list[int], kwargs: dict[str, Any]
) -> None:
    """Rejects a turn whose reasoning or calls its template leaves out: a generated part is lost."""
    parts = (*((key, "reasoning") for key in REASONING_KEYS), ("tool_calls", "tool calls"))
    for key, what in parts:
        if key in messages[-1]:
            bare = [*messages[:-1], {k: v for k, v in messages[-1].items() if k != key}]
            if render(target.render, bare, add_generation_prompt=False, **kwargs) == ids:
                raise Rejected(f"the chat template leaves out {what}")


def render(entry: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an entry of the target's chat template; what the template refuses is Rejected."""
    from jinja2 import TemplateError

    try:
        return entry(*args, **kwargs)
    except (TemplateError, TypeError) as error:
        raise Rejected(f"the chat template refuses it: {str(error)[:80]}") from None
