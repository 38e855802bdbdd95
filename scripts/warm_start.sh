#!/usr/bin/env bash
# Make a demo's model on the spot: a tiny random Qwen3-MoE, then supervised fine-tuning on noisy demonstrations.
# Hangman's, of examples/textarena.yaml, is taught in seconds, without a run.
# Usage: scripts/warm_start.sh DIRECTORY      Result: DIRECTORY/model. The directory's name says which: reverse-text, tool-use or hangman.
set -euo pipefail
cd "$(dirname "$0")/.."
directory=$1
model=$directory/model
demo=$(basename "$directory")
[[ -f $model/config.json ]] && exit 0
rm -rf "$directory/random" "$directory/model.part"
mkdir -p "$directory"
python=(.venv/bin/python -W ignore -m)
case $demo in
  reverse-text)
    "${python[@]}" scripts.models.tiny_model model "$directory/random"
    "${python[@]}" scripts.models.tiny_model demonstrations "$directory/demonstrations.jsonl" ;;
  tool-use)
    "${python[@]}" scripts.models.tiny_model model "$directory/random" --phrases
    "${python[@]}" scripts.models.tool_use_demonstrations "$directory/demonstrations.jsonl" --n 4000 --noise 0.45 ;;
  hangman)
    "${python[@]}" scripts.models.hangman_model "$directory/model.part"
    mv "$directory/model.part" "$model"
    exit 0 ;;
  *)
    echo "error: no demo is called $demo; there are reverse-text, tool-use and hangman" >&2
    exit 2 ;;
esac
run=$demo-sft-$(date +%m%d-%H%M%S)
.venv/bin/primeslurm submit "recipes/${demo//-/_}_sft.yaml" --local --name "$run" --wait \
  --set model.path="$directory/random" --set sft.data.path="$directory/demonstrations.jsonl"
# The last published policy is a complete model directory; the rename makes it appear whole or not at all.
versions=("runs/$run/weights/"v*)
cp -r "${versions[-1]}" "$directory/model.part"
mv "$directory/model.part" "$model"
