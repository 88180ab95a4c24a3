#!/usr/bin/env bash
# Trains a DLite drafter for SmolLM2-135M-Instruct on CPU and measures it on prompts it never saw.
# Usage: bash scripts/quickstart.sh [--fast] [--regenerate]
#   --fast        a shorter training on fewer answers, and 8 held-out prompts: a lower tau
#   --regenerate  the target answers the training prompts anew (default: the shipped answers)
# Writes runs/quickstart (configuration, metrics, state, export) and results/quickstart.
# Every call starts from scratch: the run and the results of the call before are deleted first.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
experiment=quickstart
regenerate=
length=256
few=()
answered=()
for option in "$@"; do
    case $option in
    --fast)
        experiment=quickstart_fast
        length=64
        few=(limit=8)
        answered=(limit=100) # what configs/experiment/quickstart_fast.yaml reads
        ;;
    --regenerate) regenerate=yes ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        echo "unknown option $option; the options are --fast and --regenerate" >&2
        exit 2
        ;;
    esac
done

step() { printf '\n== %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

cd -- "$root"
step "Set-up"
bash scripts/setup.sh
# From here on nothing is fetched: the target came with its package.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
python=.venv/bin/python

runs=runs/quickstart
results=results/quickstart
rm -rf "$runs" "$results/heldout" "$results/spec_bench"
mkdir -p "$runs" "$results"

answers=train/quickstart/answers.jsonl
if [[ -n $regenerate ]]; then
    step "The target answers the training prompts"
    answers=$runs/answers.jsonl
    $python -m train.regenerate target=smollm2-135m batch_size=32 max_new_tokens=256 text=false \
        prompts=train/prompts/quickstart.jsonl out="$answers" ${answered[@]+"${answered[@]}"}
fi

step "Training: teacher, warm-up, stable"
$python -m train.run "+experiment=$experiment" name=quickstart "data.train=[$answers]"

step "Held-out prompts: plain, ngram, dlite"
$python -m eval.acceptance draft="$runs/export" target=smollm2-135m \
    suite=eval/prompts/heldout.jsonl max_new_tokens=$length drafter=dlite,ngram batch_size=16 \
    out="$results/heldout" ${few[@]+"${few[@]}"}

spec_bench=../shared/data/spec_bench/question.jsonl
if [[ ! -f $spec_bench ]]; then
    step "Spec-Bench is left out: no $spec_bench"
elif ((${#few[@]} == 0)); then
    step "Spec-Bench, the first 40 prompts"
    $python -m eval.acceptance draft="$runs/export" target=smollm2-135m \
        suite="$spec_bench" limit=40 max_new_tokens=32 drafter=dlite,ngram batch_size=16 \
        out="$results/spec_bench"
fi

step "Summary"
$python -m eval.quickstart_summary run="$runs" results="$results" seconds="$SECONDS"
