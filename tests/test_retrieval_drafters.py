"""Emission forms, AgSpec's length, AgentSpec's blocks, and drafters built by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import byte_tokenizer
from test_memory import KEY, encode, request

from dlite.cli import main
from dlite.drafters.emission import FORMS, denumber, renderings
from dlite.drafters.length import Caps, Scale
from dlite.drafters.registry import build
from dlite.drafters.structure import parse_structure
from dlite.types import Request, Verdict, View

BLOCKS = parse_structure([[["<tool_call>", "</tool_call>"]], [["<think>", "</think>"]]])


# ---- emission forms --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbered", "plain"),
    [
        ("     1\timport os\n     2\t\n     3\tx = 1\n", "import os\n\nx = 1\n"),
        ("7:def f():\n8:\n9:    pass", "def f():\n\n    pass"),
        (" 9|a\n10|  b\r\n11|c\r\n", "a\n  b\r\nc\r\n"),
        ("<span>\n   1→x\n   2→\n</span>\n   3→y\n", "<span>\nx\n\n</span>\ny\n"),
    ],
)
def test_line_numbers_stay_in_a_files_plain_form(numbered: str, plain: str) -> None:
    assert denumber(numbered) == plain


@pytest.mark.parametrize(
    "text", ["", "x = 1\n", "1 2 3\n4 5 6\n9 8 7\n", "10 apples\n20 pears\n", "1\tone line\n"]
)
def test_columns_of_numbers_are_taken_for_line_numbers(text: str) -> None:
    assert denumber(text) == text


def test_forms_are_not_what_agents_write() -> None:
    text = 'a "b"\n\n\tc\n'
    assert dict(renderings(text, list(FORMS))) == {
        "full": text,
        "json": 'a \\"b\\"\\n\\n\\tc\\n',
        "space": ' a "b"\n \n \tc\n',
        "minus": '-a "b"\n-\n-\tc\n',
        "plus": '+a "b"\n+\n+\tc\n',
    }
    assert json.loads(f'"{FORMS["json"](text)}"') == text


# ---- AgSpec's length -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "match_length", "cap", "length"),
    [
        (1.0, 5, 32, 5),
        (0.5, 5, 32, 3),  # 2.5: halves go up, not to even
        (0.5, 1, 32, 1),
        (0.05, 4, 32, 1),  # never under 1 where something matches
        (4.0, 100, 32, 32),
        (1.0, 0, 32, 0),
        (1.0, 9, 0, 0),
        (0.5, 1000, 32, 16),  # the match counts up to the cap
    ],
)
def test_the_length_is_rounded_or_clipped_wrongly(
    alpha: float, match_length: int, cap: int, length: int
) -> None:
    assert Scale(alpha).length(match_length, cap) == length


def test_the_scale_does_not_move_with_the_verdicts() -> None:
    scale = Scale()
    rate: dict[str, Any] = {"cap": 32, "target": 0.7, "rate": 0.1}
    scale.observe(8, 8, 8, **rate)
    assert scale.alpha == pytest.approx(1.07)
    scale.observe(8, 3, 8, **rate)
    assert scale.alpha == pytest.approx(1.04)
    for drafted, asked in ((32, 32), (5, 8)):  # at the cap; the continuation ran out
        scale.observe(drafted, drafted, asked, **rate)
        assert scale.alpha == pytest.approx(1.04)
    for _ in range(1000):
        scale.observe(8, 0, 8, **rate)
    assert scale.alpha == 0.05


def test_caps_hold_for_the_wrong_agent_or_are_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "caps.json"
    file.write_text('{"shared": 6, "agents": {"coder": 12}}')
    caps = Caps.load(str(file))
    assert (caps.of("coder"), caps.of("unknown"), Caps.load("none").of("coder")) == (12, 6, 32)
    for text in ("[]", "{}", '{"shared": -1}', '{"shared": 1.5}', '{"shared": 3, "agents": []}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"profile them again"):
            Caps.load(str(file))


def test_the_static_corpus_wins_without_being_longer_by_delta(tmp_path: Path) -> None:
    from dlite.drafters.agspec import AgSpecDrafter, AgSpecOptions
    from dlite.drafters.memory import Memory
    from dlite.retrieval.corpus import Document, load
    from dlite.retrieval.corpus import build as build_corpus

    build_corpus(tmp_path, [Document("a", encode("long common text GLOBAL"))], tokenizer="t")
    for delta, expected in ((5, "session"), (4, "global")):
        options = AgSpecOptions(delta=delta)
        drafter = AgSpecDrafter(Memory(options, corpus=load(tmp_path)), options)
        one = request("a", "n text LOCAL.common text ")  # 7 tokens match here, 12 there
        drafter.start(one)
        (draft,) = drafter.propose([View(one, one.prompt, 8)])
        assert draft.source == expected
        drafter.finish(one)


# ---- AgentSpec's blocks ----------------------------------------------------------------------


def text_tokens(text: str) -> list[int]:
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def said(drafter: Any, name: str, text: str, asked: str, **agent: Any) -> str:
    """What is drafted behind `asked` in a call of the same session after `text` was generated."""
    own: dict[str, Any] = {"structure": BLOCKS, "agent_id": "a", "query_id": "q"}
    first = request(f"{name} 1", text_tokens("hello"), **own)
    drafter.start(first)
    drafter.propose([View(first, [*first.prompt, *text_tokens(text)], 8)])
    drafter.finish(first)
    second = request(f"{name} 2", text_tokens("hello"), **own | agent)
    drafter.start(second)
    (draft,) = drafter.propose([View(second, [*second.prompt, *text_tokens(asked)], 8)])
    drafter.finish(second)
    drafter.close(KEY)
    drafted = byte_tokenizer().decode(draft.tokens)
    assert isinstance(drafted, str)
    return drafted


def test_a_draft_leaves_its_block_agent_or_query() -> None:
    drafter = build("agentspec", {"length": "all"}, tokenizer=byte_tokenizer())
    text = "<tool_call>zebra crossing</tool_call>zebra stripes"
    assert said(drafter, "same", text, "<tool_call>zebra").startswith(" cross")
    assert said(drafter, "text", text, "zebra").startswith(" strip")
    assert said(drafter, "other", text, "<think>zebra") == ""
    assert said(drafter, "agent", text, "<tool_call>zebra", agent_id="b") == ""
    assert said(drafter, "query", text, "<tool_call>zebra", query_id="r") == ""
    assert said(drafter, "prompt", "nothing", "hel") == ""  # prompts are not drafted from


def test_without_structure_one_block_is_left_and_without_isolation_the_session() -> None:
    text = "<tool_call>zebra crossing</tool_call>"
    one_block = build("agentspec", {"variant": "N"}, tokenizer=byte_tokenizer())
    assert said(one_block, "n", text, "<think>zebra").startswith(" cross")
    assert said(one_block, "m", text, "<think>zebra", query_id="r") == ""
    everything = build("agentspec", {"variant": "R"}, tokenizer=byte_tokenizer())
    assert said(everything, "r", text, "<think>zebra", query_id="r").startswith(" cross")


def test_the_block_is_a_filter_in_class_mode() -> None:
    drafter = build("agentspec", {"mode": "class"}, tokenizer=byte_tokenizer())
    text = "<tool_call>zebra crossing</tool_call>zebra stripes"
    assert said(drafter, "tie", text, "<tool_call>zebra").startswith(" cross")
    assert said(drafter, "other", text, "<think>zebra").startswith(" strip")  # the newest


# ---- by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle", {}, "unknown drafter 'eagle'; choose from dlite, ngram, sam"),
        ("sam", {"depth": 3}, "unknown key 'depth'; known keys are history, engine"),
        ("sam", {"length": "long"}, "length is 'long'; choose match, agreed, all"),
        ("sam", {"live_rule": "best"}, "live_rule is 'best'; choose first, recent, vote"),
        ("agspec", {"lam": "1.5"}, "lam is 1.5; give a number between 0 and 1"),
        ("agspec", {"forms": "full,xml"}, "unknown emission form 'xml'; choose from full, json"),
        ("agspec", {"corpus": "/nowhere"}, "is no corpus manifest"),
        ("agentspec", {"history": "call"}, "history is 'call'; leave it out"),
        ("agentspec", {"variant": "Q"}, "variant is 'Q'; choose full, S, R, N"),
        ("rest", {}, "corpus is missing; add corpus=..."),
        ("dlite", {"draft": "x"}, "drafter 'dlite' reads its target's states"),
        ("ngram", {"max_n": 0}, "n-gram sizes 1 to 0; give 1 <= min_n <= max_n"),
    ],
)
def test_a_bad_name_or_option_is_taken(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build(name, options)
    assert "\n" not in str(error.value)


def test_a_corpus_from_the_command_line_is_not_what_rest_drafts_from(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"text": "The quick brown fox", "source": "fox", "licence": "MIT"},
        {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "notes.txt").write_text("lazy dog")
    out = tmp_path / "corpus"
    paths = [str(tmp_path / "rows.jsonl"), str(tmp_path / "plain")]
    command = ["corpus", "build", str(out), *paths, "--tokenizer", str(tiny_folder)]
    assert main([*command, "--licence", "CC0"]) == 0
    assert main(["corpus", "inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "3 documents" in shown and "licence CC0" in shown and "licence MIT" in shown
    assert "source fox" in shown and "rows.jsonl:2" in shown and "notes.txt" in shown
    tokenizer = byte_tokenizer()
    drafter = build("rest", {"corpus": str(out)}, tokenizer=tokenizer)
    prompt = tokenizer("The quick", add_special_tokens=False)["input_ids"]
    one = Request("a", prompt, 8)
    drafter.start(one)
    (draft,) = drafter.propose([View(one, prompt, 16)])
    assert tokenizer.decode(draft.tokens) == " brown fox<|im_end|>"
    drafter.observe(one, draft, Verdict(0, 1))
    drafter.finish(one)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"words": 1}', "rows.jsonl:1 holds no document; give"),
        ('{"text": ""}', "rows.jsonl:1 holds no document; give"),
        ('{"text": "x"}\nnot json', "rows.jsonl:2 holds no document; give"),
    ],
)
def test_a_line_that_is_no_document_is_left_out_silently(
    content: str,
    message: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    out = str(tmp_path / "corpus")
    assert main(["corpus", "build", out, str(file), "--tokenizer", str(tiny_folder)]) == 2
    assert message in capsys.readouterr().err
    missing = str(tmp_path / "absent")
    assert main(["corpus", "build", out, missing, "--tokenizer", str(tiny_folder)]) == 2
    assert "absent does not exist; name text files" in capsys.readouterr().err
