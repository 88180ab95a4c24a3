#!/usr/bin/env bash
# Sets up .venv if needed, then lint, format, types and the tests; fails if any of them fails.
# Usage: bash scripts/test.sh [PYTEST ARGUMENTS]      e.g. -m "not slow", or tests/test_verify.py
# WITH_VLLM=1 also runs the tests that need vLLM, in .venv-vllm: 10 minutes more, one is known to fail.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$root"
bash scripts/setup.sh test

export HF_HUB_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
# The models here are small: more threads only wait for each other.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}

failed=()
check() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}
check "ruff check" .venv/bin/python -m ruff check --quiet .
check "ruff format" .venv/bin/python -m ruff format --quiet --check .
check "pyright" .venv/bin/python -m pyright
if ((${#failed[@]})); then
    printf 'FAILED before the tests: %s\n' "${failed[@]}"
fi

if [[ -n ${WITH_VLLM:-} ]]; then
    bash scripts/setup.sh vllm
    check "vLLM tests" .venv-vllm/bin/python -m pytest -q --durations=10 tests/test_vllm_*.py
fi

# pytest comes last, so that its closing line does too.
.venv/bin/python -m pytest -q --durations=10 "$@" || failed+=("pytest")
((${#failed[@]} == 0))
