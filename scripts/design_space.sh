#!/usr/bin/env bash
# DLite's Table 5 on Qwen3-8B: taps, composition and rank, each alone, on an 80K-sample subset.
# Usage: ANSWERS=answers.jsonl bash scripts/design_space.sh taps|composition|rank [key=value ...]
# Writes runs/design_space/NAME for each variant; best/stable in it says the highest held-out tau.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
case ${1:-} in
taps) sweep="model.num_taps=7,9,14,20,36" ;;
composition) sweep="model.composition=sequence,feature" ;;
rank) sweep="model.rank=256,512,1024,2048,4096" ;;
*)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
key=${sweep%%=*}
exec "${PYTHON:-.venv/bin/python}" -m train.run --multirun \
    target=qwen3_8b model.num_taps=14 output=runs/design_space "name=$1-\${$key}" \
    "data.train=[${ANSWERS:?set ANSWERS to answers of the target}]" data.limit=80000 \
    mixed_precision=bf16 "$sweep" "${@:2}"
