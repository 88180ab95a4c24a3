"""`bash scripts/gpu_check.sh OUT_DIR [--tiny]`: see docs/gpu_check.md."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eval.provenance import provenance
from gpu_check import correctness, speed
from gpu_check.sizes import FULL, TINY

BUDGET_SECONDS = 450


def main(out: Path, *, tiny: bool) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        print("error: no CUDA device; --tiny runs on a CPU", file=sys.stderr)
        return 2
    plan = TINY if tiny else FULL
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    result: dict[str, Any] = {"program": "gpu_check", "tiny": tiny, **provenance(device)}
    checks: dict[str, Callable[[], Any]] = {
        "correctness": lambda: correctness.all_checks(device),
        "training": lambda: [speed.training(t, plan, device) for t in plan.targets],
        "drafting": lambda: [row for t in plan.targets for row in speed.drafting(t, plan, device)],
        "verification": lambda: [speed.verification(t, plan, device) for t in plan.targets],
    }
    for name, check in checks.items():
        if time.perf_counter() - began > BUDGET_SECONDS:
            result[name] = {"skipped": f"{BUDGET_SECONDS} s were over"}
            continue
        started = time.perf_counter()
        try:
            result[name] = check()
        except (RuntimeError, ValueError, AssertionError) as error:  # the others still count
            traceback.print_exc()
            result[name] = {"failed": " ".join(str(error).split())[:300]}
        result[f"{name}_seconds"] = time.perf_counter() - started
        (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name}: {result[f'{name}_seconds']:.0f} s", flush=True)
    print(f"written: {out / 'gpu_check.json'}")
    found = result["correctness"]
    wrong = [c["check"] for c in found if not c["ok"]] if isinstance(found, list) else []
    failed = [
        name for name in checks if isinstance(result[name], dict) and "failed" in result[name]
    ]
    if wrong or failed:
        print(f"FAILED: {', '.join(wrong + failed)}", file=sys.stderr)
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), tiny="--tiny" in sys.argv[2:]))
