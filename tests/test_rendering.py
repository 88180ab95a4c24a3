"""Calls in tokens: the prompt is what the chat template makes of it, however it is put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import byte_tokenizer
from session_rows import session_row, write_sessions

from dlite.types import OpenedFile
from eval.rendering import Call, Renderer, load_calls
from eval.traces import read_sessions

ROOT = Path(__file__).parents[1]
QWEN = ROOT.parent / "shared/data/tokenizer_qwen3"
REAL = ROOT.parent / "shared/data/trajectories.jsonl.gz"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def calls(tokenizer: str, tmp_path: Path) -> list[Call]:
    sessions = read_sessions([write_sessions(tmp_path / "s.jsonl", session_row())])
    (calls,) = load_calls(sessions, tokenizer, tmp_path / "cache").sessions
    return calls


def chat(*turns: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return text + "<|im_start|>assistant\n"


def test_a_call_reads_another_scope_or_an_earlier_calls_failure(calls: list[Call]) -> None:
    decode = byte_tokenizer().decode
    assert decode(calls[1].prompt()) == chat(("user", "Which one?"))
    last = decode(calls[4].prompt())
    assert "Wrong edit" not in last and "No such line" not in last and "def add" in last
    assert "No such line" in str(decode(calls[3].prompt()))
    assert [call.turn for call in calls] == [1, 2, 3, 4, 5]


def test_an_output_lacks_its_end_or_a_file_comes_late(calls: list[Call]) -> None:
    tokenizer = byte_tokenizer()
    assert calls[1].output == [*tokenizer.encode("a.py"), tokenizer.eos_token_id]
    assert [len(call.files) for call in calls] == [0, 0, 1, 0, 0]
    assert isinstance(calls[2].files[0], OpenedFile)
    assert [call.edits for call in calls] == [False, False, True, False, False]


def test_pieces_put_together_differ_from_the_whole_text(tokenizer: str) -> None:
    renderer, whole = Renderer(tokenizer), byte_tokenizer()
    for text in ("", "The <|im_start|><|im_end|>\n\n fox", "<|im_end|>", chat(("user", " a\n\n"))):
        found = [t for piece in renderer.piece_ids(text) for t in renderer.pieces[piece]]
        assert found == whole.encode(text, add_special_tokens=False)


def test_the_cache_gives_other_calls_or_those_of_other_sessions(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_sessions([write_sessions(tmp_path / "s.jsonl", session_row())])
    fresh = load_calls(first, tokenizer, tmp_path / "cache")
    changed = session_row()
    changed["messages"][1]["text"] = "The dog sleeps."
    other = read_sessions([write_sessions(tmp_path / "t.jsonl", changed)])
    assert load_calls(other, tokenizer, tmp_path / "cache").sessions != fresh.sessions
    monkeypatch.setattr(Renderer, "piece_ids", None)  # nothing is tokenised again
    assert load_calls(first, tokenizer, tmp_path / "cache").sessions == fresh.sessions


def test_sessions_without_a_call_are_replayed(tokenizer: str, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hello."}]}
    sessions = read_sessions([write_sessions(tmp_path / "s.jsonl", row)])
    with pytest.raises(ValueError, match="no session holds a message that a model generated"):
        load_calls(sessions, tokenizer, tmp_path / "cache")


@pytest.mark.skipif(not REAL.exists(), reason="the real sessions are not there")
def test_real_prompts_differ_from_the_tokenised_whole() -> None:
    renderer = Renderer(str(QWEN))
    for session in read_sessions([str(REAL)], "dev", limit=3):
        read = [m for m in session.messages if m.scope == session.messages[0].scope][:9]
        found = [t for piece in renderer.prompt_pieces(read) for t in renderer.pieces[piece]]
        messages = [{"role": m.role, "content": m.text} for m in read]
        text = renderer.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert found == renderer.tokenizer.encode(text, add_special_tokens=False)
