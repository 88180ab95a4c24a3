#!/usr/bin/env bash
# The paper's runs for Qwen3-4B (12 taps) and 8B (14): K 7, rank D/8, teacher 8 + warm-up 2 + stable 6
# epochs over 1.9M answers of at most 4096 tokens, batch 32 on 32 GPUs (DLite section 5.1, appendix A).
# Usage: bash scripts/qwen3.sh 4b|8b plan|answers|train [key=value ...]
#   plan     hours, memory, disk and cost, from the target's config alone; loads and starts nothing
#   answers  the target answers the prompts: start the server first, as the message says
#   train    on this node's GPUs; for several nodes: sbatch scripts/train.slurm, with its settings
# GPUS (32), GPU_TERAFLOPS (989), MFU (0.3) and DOLLARS (2.5 a GPU hour) are the plan's assumptions.
# TARGET names other weights or a folder, ANSWERS another file, SERVER another URL.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
    exit 2
}
[[ ${2:-} =~ ^(plan|answers|train)$ ]] || usage
case $1 in
4b) taps=12 ;;
8b) taps=14 ;;
*) usage ;;
esac
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
target=${TARGET:-Qwen/Qwen3-${1^^}}
answers=${ANSWERS:-runs/qwen3_$1-answers.jsonl}
settings=("target=qwen3_$1" "target.name=$target" "name=qwen3_$1" "model.num_taps=$taps"
    +target.template_kwargs.enable_thinking=false
    "data.train=[$answers]" mixed_precision=bf16 optim.batch_size=32
    eval_every=5000 save_every=1000)
python=${PYTHON:-.venv/bin/python}

case $2 in
plan)
    exec "$python" -m train.run "${settings[@]}" run=plan plan.samples=1900000 \
        "plan.gpus=${GPUS:-32}" "plan.gpu_teraflops=${GPU_TERAFLOPS:-989}" "plan.mfu=${MFU:-0.3}" \
        "plan.dollars_per_gpu_hour=${DOLLARS:-2.5}" "${@:3}"
    ;;
answers)
    server=${SERVER:-http://127.0.0.1:8000/v1}
    echo "asking $server; start it with: vllm serve $target --max-model-len 4096"
    exec "$python" -m train.regenerate "server=$server" "model=$target" prompts=dlite-paper \
        "out=$answers" max_new_tokens=3072 concurrency=256 \
        template_kwargs.enable_thinking=false "${@:3}"
    ;;
train)
    exec "$(dirname -- "$python")/accelerate" launch \
        --config_file "${ACCELERATE_CONFIG:-configs/accelerate/ddp.yaml}" \
        -m train.run "${settings[@]}" "${@:3}"
    ;;
esac
