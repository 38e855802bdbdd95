#!/usr/bin/env bash
# The demo: an embedded Slurm cluster, a warm start, then a real asynchronous RL run of the recipe, shown live.
# Usage: scripts/demo.sh [RECIPE]        Where Slurm is missing, the same recipe runs through the local executor.
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=${1:-recipes/reverse_text.yaml}
primeslurm=.venv/bin/primeslurm
home=.primeslurm
name=demo-$(date +%m%d-%H%M%S)
where=(--local)

if command -v slurmctld >/dev/null && [[ $(id -u) == 0 ]]; then
  cluster=demo-$$
  site=$($primeslurm cluster up --name $cluster --nodes 4 --gpus-per-node 2 --runs runs)
  where=(--site "$site")
  trap '$primeslurm cluster down --name $cluster' EXIT
else
  echo "Slurm's daemons or root are missing: running the same recipe through the local executor" >&2
fi

# A recipe whose model is below $home starts from one that is made on the spot.
model=$(.venv/bin/python -c 'import primeslurm, sys; print(primeslurm.load(sys.argv[1], local=True).recipe.model.path)' "$recipe")
echo "1/3 teach the starting model by SFT (about 1 minute, only the first time)" >&2
[[ $model != "$home"/*/model ]] || scripts/warm_start.sh "$(dirname "$model")"
echo "2/3 show the job of the RL run, without submitting it" >&2
$primeslurm submit "$recipe" "${where[@]}" --name "$name" --dry-run
echo "3/3 train with RL (1 to 2 minutes)" >&2
$primeslurm submit "$recipe" "${where[@]}" --name "$name" --wait
$primeslurm summary "runs/$name"
