#!/usr/bin/env bash
# Replays recorded agent sessions: profiles from one split, drafters compared on another, a report.
# Usage: bash scripts/agents.sh SESSIONS TOKENIZER [OUT] [key=value ...]
#   SESSIONS   file or folder of sessions (docs/sessions.md)
#   TOKENIZER  a target's name, folder or hub id, with a chat template
#   OUT        default runs/agents: report.html, tables.md, summary.json; profile/, replay/, ablations/
#   key=value  of eval.simulate, for all replays: limit=8, seeds=1, batch=1,16 ...
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help || $# -lt 2 ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    [[ $# -ge 1 ]] && exit 0 || exit 2
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
sessions=$(realpath -- "$1")
tokenizer=$2
[[ -d $tokenizer ]] && tokenizer=$(realpath -- "$tokenizer")
shift 2
out=runs/agents
if [[ ${1-} == [^=]* && ${1-} != *=* ]]; then
    out=$(realpath -m -- "$1")
    shift
fi

step() { printf '\n== %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

cd -- "$root"
step "Set-up"
bash scripts/setup.sh
python=.venv/bin/python
what=(sessions="$sessions" tokenizer="$tokenizer")

step "Static corpus, caps and priors from split global"
$python -m eval.profile "${what[@]}" split=global out="$out/profile"

replay=("${what[@]}" split=eval profile="$out/profile")
suffix= arctic= # the drafters that need a package of their own
if $python -c "import arctic_inference" 2>/dev/null; then
    suffix=suffix, arctic="arctic:*,"
fi

step "Drafters, one request at a time and in batches"
$python -m eval.simulate "${replay[@]}" batch=1,4,16,64 seeds=6 out="$out/replay" \
    drafter="ngram,ngram:pld10,${suffix}sam,agentspec,agspec,planner,hybrid" "$@"

step "Corpora and controls, one request at a time"
$python -m eval.simulate "${replay[@]}" batch=1 out="$out/ablations" \
    drafter="${arctic}sam:*,agentspec:*,agspec:*,planner:*" "$@"

step "Report"
$python -m eval.report inputs="$out/replay,$out/ablations" out="$out/report.html"
$python -m eval.agents_summary inputs="$out/replay,$out/ablations" out="$out"
