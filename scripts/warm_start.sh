#!/usr/bin/env bash
# Make the demo's model on the spot: a tiny random Qwen3-MoE, then supervised fine-tuning on noisy demonstrations.
# Usage: scripts/warm_start.sh DIRECTORY [SITE]      Result: DIRECTORY/model
set -euo pipefail
directory=$1
site=${2:-}
model=$directory/model
[[ -f $model/MANIFEST.json ]] && exit 0
mkdir -p "$directory"
.venv/bin/python -m primeslurm.trainer.tiny model "$directory/random"
.venv/bin/python -m primeslurm.trainer.tiny demonstrations "$directory/demonstrations.jsonl"
runs=$directory/runs
rm -rf "$runs/reverse-text-sft"
where=(--local)
[[ -n $site ]] && where=(--site "$site")
.venv/bin/primeslurm submit recipes/reverse_text_sft.yaml "${where[@]}" --wait
