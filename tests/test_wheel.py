"""What the built wheel holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dlite

ROOT = Path(__file__).parents[1]
STUB = "dlite/retrieval/_native.pyi"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_library_and_no_program(wheel: Path) -> None:
    assert wheel.name.startswith(f"dlite-{dlite.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if ".dist-info/" not in name}
    built = {name for name in code if name.startswith("dlite/retrieval/_native.")} - {STUB}
    assert len(built) == 1  # the extension; its sources stay behind
    files = [file for file in (ROOT / "dlite").rglob("*") if file.is_file()]
    ours = {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    left_out = {name for name in ours if "/native/" in name or "/_native." in name} - {STUB}
    assert code - built == ours - left_out
    assert "dlite/py.typed" in code
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_check_wheel_contents_finds_nothing(wheel: Path) -> None:
    command = [sys.executable, "-m", "check_wheel_contents", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
