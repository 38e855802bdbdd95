#!/usr/bin/env bash
# The demo's run on real GPUs, without Slurm: warm start on one, then RL with FSDP2 on two, prefill and decode on one each.
# Usage: benchmarks/gpu_run.sh OUT [TRAINER_GPUS [OPTIONS OF THE RL RUN]]     Results: OUT/*/summary.json, OUT/*/attempts
# Needs 2 + TRAINER_GPUS GPUs; options, for example `--set inference.expert_parallel=true`, may ask for more.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
trainer_gpus=${2:-2}
options=("${@:3}")
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:${PYTHONPATH:-}
mkdir -p "$out"
work=$(mktemp -d)

keep() { # RUN NAME: what a run left behind
  mkdir -p "$out/$2"
  cp -r "runs/$1/attempts" "runs/$1/metrics.jsonl" "$out/$2/" 2>/dev/null
  $python -m primeslurm summary "runs/$1" --json | tee "$out/$2/summary.json"
}

$python -W ignore -m primeslurm.trainer.tiny model "$work/random" 2>/dev/null
$python -W ignore -m primeslurm.trainer.tiny demonstrations "$work/demonstrations.jsonl"

sft=gpu-sft-$$
timeout 150 $python -m primeslurm submit recipes/reverse_text_sft.yaml --local --name $sft --wait \
  --set slurm.max_attempts=1 --set model.dtype=bfloat16 \
  --set model.path="$work/random" --set sft.data.path="$work/demonstrations.jsonl" 2>&1 | tail -n 3
keep $sft sft
model=$(ls -d runs/$sft/weights/v* | sort | tail -n 1)
grep -A 30 Traceback runs/$sft/attempts/1/logs/trainer/*.log | tail -n 30

rl=gpu-rl-$$
timeout 420 $python -m primeslurm submit recipes/reverse_text.yaml --local --name $rl --wait \
  --set slurm.max_attempts=1 --set model.path="${model:-$work/random}" --set model.dtype=bfloat16 \
  --set inference.enforce_eager=true --set inference.gpu_memory_utilization=0.3 \
  --set deployment.train.gpus_per_node="$trainer_gpus" "${options[@]}"
code=$?
[[ $code == 0 ]] || $python -m primeslurm cancel runs/$rl
keep $rl rl
nvidia-smi --query-gpu=name,memory.used --format=csv >"$out/gpus.csv"
rm -rf "$work"
exit $code
