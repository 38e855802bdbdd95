#!/usr/bin/env bash
# benchmarks/training_speed.py over shapes, lengths and layouts, as many as GPUS allow; one JSON file each in OUT.
# Usage: benchmarks/training_speed.sh OUT GPUS     What fails, or takes longer than three minutes, leaves its log and no JSON.
# Few layers at full width stand for the whole model, and the vocabulary shrinks with them: 1/6 of Qwen3's, 1/40 of GLM-5's.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=$(mkdir -p "$1" && realpath "$1")
gpus=$2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:${PYTHONPATH:-}

measure() { # NAME OPTIONS...
  timeout 180 "$python" -W ignore -m benchmarks.training_speed --ranks "$gpus" "${@:2}" --out "$out/$1.json" >"$out/$1.log" 2>&1 \
    && echo "$1: $(tr -d '\n ' <"$out/$1.json" | grep -o '"ours":.*')" || echo "$1: failed, see $out/$1.log"
}

qwen3=(--shape qwen3_30b_a3b --vocab 25600 --seq 16384)
glm5=(--shape glm5 --layers $((gpus < 4 ? 2 : gpus)) --experts $((16 * gpus)) --vocab 4096 --optimizer sgd --ep "$gpus")
measure qwen3_30b_a3b "${qwen3[@]}" --layers $((4 * gpus)) --ep "$gpus" --against torchtitan
measure qwen3_4b --shape qwen3_4b --vocab 25600 --layers $((gpus < 2 ? 12 : 24)) --seq 16384 --against torchtitan
measure qwen3_30b_a3b_fp8 "${qwen3[@]}" --layers $((4 * gpus)) --ep "$gpus" --fp8
measure glm5_16k "${glm5[@]}" --seq 16384
measure glm5_16k_fp8 "${glm5[@]}" --seq 16384 --fp8
measure glm5_65k "${glm5[@]}" --seq 65536 --cp "$gpus"
measure glm5_131k "${glm5[@]}" --seq 131072 --cp "$gpus"
measure qwen3_30b_a3b_65k "${qwen3[@]}" --seq 65536 --layers $((4 * gpus)) --ep "$gpus" --cp "$gpus"
