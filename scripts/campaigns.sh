#!/usr/bin/env bash
# Run long tests, one after another: about two and a half hours on two cores. As root, with Slurm's daemons.
# Usage: scripts/campaigns.sh [NAME...]      Default: all of them.
#   runs    whole training runs and large emulations: the tests that are marked `campaign`
#   fuzz    the fuzz tests with many examples
#   power   power cuts at random moments of a run
#   chaos   random faults on runs on an emulated cluster
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
mkdir -p build

campaign() {
  case $1 in
    runs) python -m pytest --durations=0 -m campaign tests ;;
    fuzz) PRIMESLURM_FUZZ_EXAMPLES=1000 python -m pytest --timeout=3600 tests/unit/fuzz ;;
    power) python -m tests.power.rounds --points 24 --seed "$RANDOM" --out build/power_cuts.json ;;
    chaos) python -m tests.chaos --faults 60 --seed "$RANDOM" --out build/chaos.json ;;
    *) echo "error: no campaign \"$1\": choose runs, fuzz, power or chaos" >&2 && return 2 ;;
  esac
}

(($#)) || set -- runs fuzz power chaos
failed=()
for name in "$@"; do
  echo "== $name =="
  campaign "$name" || failed+=("$name")
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
