"""Where a result comes from: the commit, the versions, the device, the command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "numpy")


def provenance(device: str) -> dict[str, Any]:
    """Belongs into every result file."""
    from dlite import __version__

    return {
        "command": shlex.join(["python", "-m", _program(), *sys.argv[1:]]),
        "commit": commit(),
        "versions": {
            "dlite": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "device": device_name(device),
    }


def commit() -> str | None:
    """The commit of this tree, "-dirty" where files differ from it; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device}: {_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _program() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else Path(sys.argv[0]).name
