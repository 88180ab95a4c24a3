#!/usr/bin/env bash
# Sets up .venv if needed, then lint, format, types and the tests; fails if any of them fails.
# Usage: bash scripts/test.sh [PYTEST ARGUMENTS]      e.g. -m "not slow", or tests/test_verify.py
# With CI or WITH_VLLM set, the tests that need vLLM come first, in an environment of their own (.venv-vllm,
# 2.6 GB); where that can't be installed, a line says so.
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

if [[ -z ${CI:-}${WITH_VLLM:-} ]]; then
    echo "vLLM's tests are skipped: WITH_VLLM=1 runs them"
elif bash scripts/setup.sh vllm; then
    check "vLLM tests" .venv-vllm/bin/python -m pytest -q --durations=10 -m "not slow" \
        tests/test_vllm_*.py
else
    echo "vLLM's tests are skipped: .venv-vllm could not be set up, see above"
fi
if ((${#failed[@]})); then
    printf 'FAILED before the tests: %s\n' "${failed[@]}"
fi

# pytest comes last, so that its closing line does too.
.venv/bin/python -m pytest -q --durations=10 "$@" || failed+=("pytest")
((${#failed[@]} == 0))
