"""Which package may import which, and that importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {
    "accelerate",
    "arctic_inference",
    "datasets",
    "deepspeed",
    "hydra",
    "matplotlib",
    "vllm",
    "wandb",
}


def imported_modules(source: str) -> set[str]:
    """Every absolute import of a file, those inside functions and `import_module("...")` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                func
            ).rpartition(".")[2] in {"import_module", "__import__"}:
                found.add(name)
    return found


def importers_of(package: str, *folders: str) -> list[str]:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert files
    return [
        str(file.relative_to(ROOT))
        for file in sorted(files)
        if package in {name.partition(".")[0] for name in imported_modules(file.read_text())}
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import train.run as r",
        "def f():\n    from train import loop",
        "import importlib\nimportlib.import_module('train.run')",
    ],
)
def test_an_import_hidden_in_a_function_or_a_string_is_seen(source: str) -> None:
    assert "train" in {name.partition(".")[0] for name in imported_modules(source)}


def test_the_library_imports_no_program() -> None:
    assert importers_of("train", "dlite") + importers_of("eval", "dlite") == []


def test_training_and_evaluation_do_not_know_each_other() -> None:
    assert importers_of("eval", "train") + importers_of("train", "eval") == []


def test_only_the_plugin_imports_vllm() -> None:
    importers = importers_of("vllm", "dlite", "train", "eval")
    assert [file for file in importers if not file.startswith("dlite/vllm_plugin/")] == []


def loaded_by_importing(*modules: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after importing `modules`."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(package: str) -> list[str]:
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if "vllm_plugin" not in parts and "__main__" not in parts:
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_importing_the_package_alone_loads_no_framework() -> None:
    assert loaded_by_importing("dlite") & {"torch", "transformers", "omegaconf"} == set()


@pytest.fixture(scope="module")
def optional() -> set[str]:
    """The optional packages, less those that transformers, a hard dependency, loads by itself."""
    return OPTIONAL - loaded_by_importing("transformers.modeling_utils")


def test_importing_every_module_of_the_library_loads_no_optional_package(
    optional: set[str],
) -> None:
    assert loaded_by_importing(*modules_of("dlite")) & optional == set()


def test_importing_the_evaluation_loads_no_optional_package(optional: set[str]) -> None:
    assert loaded_by_importing(*modules_of("eval")) & optional == set()


def test_importing_the_training_loads_no_tracker_and_no_deepspeed(optional: set[str]) -> None:
    assert loaded_by_importing(*modules_of("train")) & (optional - {"accelerate", "hydra"}) == set()
