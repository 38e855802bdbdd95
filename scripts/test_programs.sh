#!/usr/bin/env bash
# Install what only tests use, as root on Debian: a browser, container engines, apptainer, Slurm's accounting. What cannot
# be had is named, and the tests that need it are skipped; those of Slurm's accounting fail under CI.
set -euo pipefail
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # the packages' own services stay off
mkdir -p build

# try PROGRAM COMMAND...: install a program, unless it is there.
try() {
  command -v "$1" >/dev/null || "${@:2}" >build/test_programs.log 2>&1 || {
    tail -n 3 build/test_programs.log
    echo "warning: $1 cannot be installed; tests that need it are skipped"
  } >&2
}

get=(apt-get install -y -qq --no-install-recommends)
apt-get update -qq
try chromium "${get[@]}" chromium
try dockerd "${get[@]}" docker.io
try busybox "${get[@]}" busybox-static
try apptainer scripts/apptainer.sh
try mariadbd "${get[@]}" mariadb-server
try slurmdbd "${get[@]}" slurmdbd
