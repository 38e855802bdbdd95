#!/usr/bin/env bash
# Install what is missing, and only that: Python packages from the lock, and Slurm from the distribution.
# Usage: scripts/setup.sh [cpu|gpu]      Default: gpu where an NVIDIA device is, else cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
pip=.venv/bin/pip
flavour=${1:-$([[ -e /dev/nvidia0 ]] && echo gpu || echo cpu)}
lock=requirements/$flavour.txt
stamp=.venv/.installed
wanted=$(cat "$lock" pyproject.toml third_party/cpu/make_wheels.py | sha256sum)

install_python() {
  local index=()
  if [[ $flavour == cpu ]]; then
    .venv/bin/python third_party/cpu/make_wheels.py build/wheels
    # A local build of CPU torch is used if pip knows one; otherwise PyTorch's own index has it.
    if ! $pip download --quiet --no-deps --dest build/torch "$(grep '^torch==' "$lock")" 2>/dev/null; then
      index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    index+=(--find-links build/wheels)
  fi
  $pip install -qq "${index[@]}" --requirement "$lock"
  $pip install -qq --no-deps --editable .
  echo "$wanted" >"$stamp"
}

install_slurm() {
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  # The packages' own services stay off: clusters here are private and run as plain processes.
  apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge libibverbs1 librdmacm1
}

if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "installing Python packages from $lock" >&2
  install_python
fi
for program in slurmctld slurmd munged sbatch; do
  if ! command -v $program >/dev/null && [[ ! -x /usr/sbin/$program ]]; then
    echo "installing Slurm" >&2
    install_slurm >&2 || echo "warning: $program is missing and cannot be installed here; only --local works" >&2
    break
  fi
done
