"""What the built wheel holds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dlite

ROOT = Path(__file__).parents[1]
STUB = "dlite/retrieval/_native.pyi"


def build_wheel(folder: Path, *options: str, **environment: str) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [*command, *options, str(ROOT)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def code_of(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def library_files() -> set[str]:
    """What every wheel holds: no native sources, and no extension that somebody built in place."""
    files = [file for file in (ROOT / "dlite").rglob("*") if file.is_file()]
    names = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    return {name for name in names if "/native/" not in name and "/_native." not in name} | {STUB}


def extensions(code: set[str]) -> set[str]:
    return {name for name in code if name.startswith("dlite/retrieval/_native.")} - {STUB}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_library_and_no_program(wheel: Path) -> None:
    assert wheel.name.startswith(f"dlite-{dlite.__version__}-")
    code = code_of(wheel)
    assert len(extensions(code)) == 1
    assert code - extensions(code) == library_files()
    assert "dlite/py.typed" in code
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_python(tmp_path: Path) -> None:
    fresh = f"--config-setting=build-dir={tmp_path / 'build'}"
    code = code_of(build_wheel(tmp_path, fresh, CXX="/bin/false"))
    assert code == library_files()


@pytest.mark.slow
def test_check_wheel_contents_finds_nothing(wheel: Path) -> None:
    command = [sys.executable, "-m", "check_wheel_contents", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
