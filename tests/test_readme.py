"""The README's tree and the commands of all documents, held against the repository."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def tree_paths(tree: str) -> Iterator[str]:
    """Two spaces indent a level; names are parted by one space, words follow after two."""
    parents: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.strip().partition("  ")[0].split():
            yield "".join([*parents[:depth], name])
            if name.endswith("/"):
                parents[depth:] = [name]


TREE = list(tree_paths(fenced(README.partition("## The tree")[2], "")[0]))


def is_listed(path: Path) -> bool:
    return path.is_file() and path.name != "__init__.py"


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in TREE if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "pattern", ["*.md", "dlite/**/*.py", "train/*.py", "eval/*.py", "scripts/*", "docs/*.md"]
)
def test_no_file_is_missing_from_the_tree(pattern: str) -> None:
    files = {str(f.relative_to(ROOT)) for f in ROOT.glob(pattern) if is_listed(f)}
    assert files
    assert files - set(TREE) == set()


def test_every_link_to_a_file_of_the_repository_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
            assert "://" in link or (document.parent / link).exists(), f"{document.name}: {link}"


def commands_of(document: Path) -> list[list[str]]:
    lines = "\n".join(fenced(document.read_text(), "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_bash(script: str, *options: str) -> None:
    assert (ROOT / script).exists()
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    if options:
        done = subprocess.run(["bash", script, *options, "--help"], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()


def check_dlite(*arguments: str) -> None:
    from dlite.cli import parser

    parser().parse_args(arguments)


def check_python(flag: str, module: str, *arguments: str) -> None:
    assert flag == "-m"
    if module == "train.run":
        import hydra

        from train.config import check
        from train.run import CONFIGS

        with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
            check(hydra.compose("train", list(arguments)))
    elif module == "train.data":
        from dlite.config import parse
        from train.corpus_check import Check
        from train.stored import Tokenize

        parse({"check": Check, "tokenize": Tokenize}[arguments[0]], arguments[1:])
    elif module.partition(".")[0] in {"train", "eval"}:
        from dlite.config import parse

        parse(importlib.import_module(module).Config, arguments)
    else:
        assert importlib.util.find_spec(module)
        for path in [a for a in arguments if a.endswith(".py")]:
            assert (ROOT / path).exists()


def check_install(verb: str, *arguments: str) -> None:
    assert verb == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {e for a in arguments for e in re.findall(r"[\w-]+", a.partition("[")[2])}
    assert extras <= set(project["optional-dependencies"])


def check_accelerate(verb: str, *arguments: str) -> None:
    assert verb == "launch"
    check_python(*arguments[arguments.index("-m") :])


CHECKS: dict[str, Callable[..., None]] = {
    "bash": check_bash,
    "sbatch": lambda script, *_: check_bash(script),
    "dlite": check_dlite,
    "python": check_python,
    ".venv/bin/python": check_python,
    "pip": check_install,
    "accelerate": check_accelerate,
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{document.name}: {shlex.join(words)[:60]}")
        for document in DOCUMENTS
        for words in commands_of(document)
    ],
)
def test_every_documented_command_exists_and_takes_its_arguments(words: list[str]) -> None:
    program, *arguments = words
    assert program in CHECKS, f"{program}: no check for this program; add one"
    CHECKS[program](*arguments)


def test_the_two_commands_come_first() -> None:
    first, second = fenced(README, "bash")[:2]
    assert [first, second] == ["bash scripts/quickstart.sh\n", "bash scripts/test.sh\n"]


@pytest.mark.parametrize("experiment", ["quickstart", "quickstart_fast"])
def test_every_program_of_the_quickstart_takes_its_arguments(experiment: str) -> None:
    script = (ROOT / "scripts/quickstart.sh").read_text().replace("\\\n", " ")
    assert re.search(rf"\bexperiment={experiment}\b", script)
    (few,) = re.findall(r"few=\((.+)\)", script)
    script = script.replace('${few[@]+"${few[@]}"}', few)
    script = script.replace("$experiment", experiment).replace("$SECONDS", "1")
    script = script.replace("$length", "256").replace("$", "")
    programs = re.findall(r"^ *python -m (.*)$", script, re.M)
    assert len(programs) == 5
    for program in programs:
        check_python("-m", *shlex.split(program))
