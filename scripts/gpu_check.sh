#!/usr/bin/env bash
# Checks on one GPU that the fast paths are right, and times training, drafting and verification at
# the true sizes of Qwen3-4B and 8B (random weights). At most 8 minutes; needs torch, transformers,
# accelerate, triton and safetensors; offline. docs/gpu_check.md says what to look at.
# Usage: bash scripts/gpu_check.sh OUT_DIR [--tiny]      writes OUT_DIR/gpu_check.json
#   --tiny  a few layers and tokens, on a CPU too: CI holds the script together with it
# PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }
case " $* " in
*" --help "* | *" -h "*)
    usage
    exit 0
    ;;
esac
if [[ $# -lt 1 || $1 == -* ]]; then
    usage >&2
    exit 2
fi
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$root:$root/scripts"
exec "$python" -m gpu_check "$@"
