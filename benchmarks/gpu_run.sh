#!/usr/bin/env bash
# The demo's run on real GPUs, without Slurm: warm start on one, then RL with FSDP2 on two, prefill and decode on one each.
# Usage: benchmarks/gpu_run.sh OUT [TRAINER_GPUS]     Needs 2 + TRAINER_GPUS GPUs. Results: OUT/*.json, OUT/logs
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
trainer_gpus=${2:-2}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:${PYTHONPATH:-}
mkdir -p "$out"
work=$(mktemp -d)

$python -W ignore -m primeslurm.trainer.tiny model "$work/random" 2>/dev/null
$python -W ignore -m primeslurm.trainer.tiny demonstrations "$work/demonstrations.jsonl"

sft=gpu-sft-$$
$python -m primeslurm submit recipes/reverse_text_sft.yaml --local --name $sft --wait \
  --set model.path="$work/random" --set sft.data.path="$work/demonstrations.jsonl" --set model.dtype=bfloat16
cp -r runs/$sft/attempts/1/logs "$out/sft_logs"
cp runs/$sft/metrics.jsonl "$out/sft_metrics.jsonl"
model=$(ls -d runs/$sft/weights/v* | sort | tail -n 1)

rl=gpu-rl-$$
timeout 400 $python -m primeslurm submit recipes/reverse_text.yaml --local --name $rl --wait \
  --set model.path="$model" --set model.dtype=bfloat16 --set inference.enforce_eager=true \
  --set inference.gpu_memory_utilization=0.3 --set deployment.train.gpus_per_node="$trainer_gpus"
code=$?
$python -m primeslurm summary runs/$rl --json | tee "$out/summary.json"
$python -m primeslurm status runs/$rl --json >"$out/status.json"
cp runs/$rl/metrics.jsonl "$out/metrics.jsonl"
mkdir -p "$out/logs" && cp -r runs/$rl/attempts/*/logs/* runs/$rl/attempts/*/events "$out/logs/"
nvidia-smi --query-gpu=name,memory.used --format=csv >"$out/gpus.csv"
[[ $code == 0 ]] || $python -m primeslurm cancel runs/$rl
rm -rf "$work"
exit $code
