#!/usr/bin/env bash
# Make the demo's model on the spot: a tiny random Qwen3-MoE, then supervised fine-tuning on noisy demonstrations.
# Usage: scripts/warm_start.sh DIRECTORY      Result: DIRECTORY/model
set -euo pipefail
cd "$(dirname "$0")/.."
directory=$1
model=$directory/model
[[ -f $model/MANIFEST.json ]] && exit 0
rm -rf "$directory/random" "$directory/model.part"
mkdir -p "$directory"
.venv/bin/python -W ignore -m primeslurm.trainer.tiny model "$directory/random"
.venv/bin/python -W ignore -m primeslurm.trainer.tiny demonstrations "$directory/demonstrations.jsonl"
run=reverse-text-sft-$(date +%m%d-%H%M%S)
.venv/bin/primeslurm submit recipes/reverse_text_sft.yaml --local --name "$run" --wait \
  --set model.path="$directory/random" --set sft.data.path="$directory/demonstrations.jsonl"
# The last published policy is a complete model directory; the rename makes it appear whole or not at all.
versions=("runs/$run/weights/"v*)
cp -r "${versions[-1]}" "$directory/model.part"
mv "$directory/model.part" "$model"
