#!/usr/bin/env bash
# Install what is missing, and only that: Python packages from the lock by uv; Slurm and bubblewrap from the distribution
# beside them.
# Usage: scripts/setup.sh [cpu|gpu]      Default: gpu where an NVIDIA device is, else cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
flavour=${1:-$([[ -e /dev/nvidia0 ]] && echo gpu || echo cpu)}
lock=requirements/$flavour.txt
stamp=.venv/.installed
wanted=$(cat "$lock" pyproject.toml scripts/setup.sh third_party/cpu/make_wheels.py | sha256sum)

# Compiled once here, and not by every process anew where Python may not write beside what it reads.
uv_install() { .venv/bin/uv pip install --quiet --compile-bytecode --python "$python" "$@"; }

install_torch_for_cpu() {
  local torch
  torch=$(grep '^torch==' "$lock")
  # A local build is used if pip knows one; otherwise PyTorch's own index has it. Nothing else is taken from there.
  if $python -m pip download --quiet --no-deps --dest build/torch "$torch" 2>/dev/null; then
    uv_install --no-deps --no-index --find-links build/torch "$torch"
  else
    uv_install --no-deps --default-index https://download.pytorch.org/whl/cpu "$torch"
  fi
}

install_python() {
  local stand_ins=()
  source scripts/mirror.sh
  if [[ $flavour == cpu ]]; then
    install_torch_for_cpu
    $python third_party/cpu/make_wheels.py build/wheels
    stand_ins=(--find-links build/wheels)
  fi
  uv_install "${stand_ins[@]}" --requirement "$lock"
  uv_install --no-deps --editable .
  echo "$wanted" >"$stamp"
}

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

if system_is_missing; then
  echo "installing Slurm and bubblewrap" >&2
  # Its output waits until the end: two installations at once would be read by nobody.
  mkdir -p build
  (install_system) >build/system.log 2>&1 &
  system=$!
  trap wait EXIT  # whatever happens here, apt is not left running behind it
fi
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "installing Python packages from $lock" >&2
  install_python
fi
if [[ -n ${system:-} ]] && ! wait "$system"; then
  tail -n 5 build/system.log >&2
  echo "warning: Slurm's daemons or bubblewrap are missing and cannot be installed here: without the first only --local" \
    "works, without the second no program of a rollout runs outside of containers" >&2
fi
