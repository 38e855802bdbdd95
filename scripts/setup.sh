#!/usr/bin/env bash
# Install what is missing, and only that: Python packages from the lock by uv, and Slurm and bubblewrap from the distribution
# beside them. An environment keeps its flavour: on a login node without GPUs, that of GPU nodes stays what it is.
# Usage: scripts/setup.sh [cpu|gpu]      Default: what is installed already, else gpu where an NVIDIA device is, else cpu.
#        scripts/setup.sh gpu --to DIR   An environment for other machines, with a Python of its own. Slurm is not installed.
set -euo pipefail
cd "$(dirname "$0")/.."

system_is_missing() {
  local program
  for program in slurmctld slurmd munged sbatch bwrap; do
    command -v $program >/dev/null || [[ -x /usr/sbin/$program ]] || return 0
  done
  return 1
}

install_system() {
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  # The packages' own services stay off: clusters here are private and run as plain processes.
  apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
    slurm-wlm munge libibverbs1 librdmacm1 bubblewrap
}

if [[ " $* " != *" --to"[\ =]* ]] && system_is_missing; then
  echo "installing Slurm and bubblewrap" >&2
  # Its output waits until the end: two installations at once would be read by nobody.
  mkdir -p build
  (install_system) >build/system.log 2>&1 &
  system=$!
  trap wait EXIT  # whatever happens here, apt is not left running behind it
fi
.venv/bin/python -m primeslurm.api.setup.installing --to .venv "$@"
if [[ -n ${system:-} ]] && ! wait "$system"; then
  tail -n 5 build/system.log >&2
  echo "warning: Slurm's daemons or bubblewrap are missing and cannot be installed here. Without Slurm, only --local works." \
    "Without bubblewrap, programs of rollouts run in containers only" >&2
fi
