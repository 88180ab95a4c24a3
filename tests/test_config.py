from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from dlite.config import describe, parse


@dataclass
class Inner:
    rate: float = 0.1


@dataclass
class Example:
    """An example program."""

    out: str
    target: str = "tiny"
    limit: int | None = None
    drafter: list[str] = field(default_factory=lambda: ["dlite"])
    contexts: list[int] = field(default_factory=list)
    overwrite: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.target == "wrong":
            raise ValueError("target is 'wrong'; give another")


def test_lists_split_at_commas_and_keep_their_type() -> None:
    config = parse(Example, ["out=x", "drafter=dlite,ngram", "contexts=64,1024"])
    assert config.drafter == ["dlite", "ngram"]
    assert config.contexts == [64, 1024]
    assert parse(Example, ["out=x", "drafter="]).drafter == []


def test_text_is_not_read_as_yaml() -> None:
    config = parse(Example, ["out=1e5", "target=http://127.0.0.1:80/v1?a=b"])
    assert config.out == "1e5"
    assert config.target == "http://127.0.0.1:80/v1?a=b"


def test_typed_nested_and_free_values() -> None:
    nested = ["inner.rate=1e-4", "template_kwargs.enable_thinking=false"]
    config = parse(Example, ["out=", "limit=3", "overwrite=true", *nested])
    assert (config.out, config.limit, config.overwrite) == ("", 3, True)
    assert config.inner == Inner(1e-4)
    assert config.template_kwargs == {"enable_thinking": False}
    assert parse(Example, ["out=x", "limit=3", "limit=null"]).limit is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["out=x", "limti=3"], "limti"),
        (["out=x", "inner.rat=3"], "inner.rat"),
        (["out=x", "out.deep=3"], "out.deep"),
        (["out=x", "limit=many"], "limit=many"),
        (["out=x", "contexts=64,many"], "contexts=64,many"),
        (["out=x", "overwrite=perhaps"], "overwrite=perhaps"),
        (["out=x", "--limit"], "--limit"),
        (["limit=3"], "out is missing"),
        (["out=x", "target=wrong"], "target is 'wrong'"),
    ],
)
def test_bad_argument_is_one_line_that_names_it(argv: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        parse(Example, argv)
    assert "\n" not in str(caught.value)


def test_program_prints_one_line_and_exit_code_2() -> None:
    code = (
        "from dataclasses import dataclass\nfrom dlite.config import run\n"
        "@dataclass\nclass Config:\n    limit: int = 1\nrun(Config, print)\n"
    )

    def call(argument: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, argument]
        return subprocess.run(command, capture_output=True, text=True)

    bad = call("limti=3")
    assert bad.returncode == 2
    assert bad.stderr.splitlines() == ["error: unknown key 'limti'; known keys are limit"]
    assert "limit=7" in call("limit=7").stdout


def test_help_lists_every_key_with_its_default() -> None:
    text = describe(Example)
    assert "An example program." in text
    assert all(line in text for line in ("out=(required)", "drafter=dlite", "limit=None"))
