#!/usr/bin/env bash
# All tests with coverage, which fail below the floor in pyproject.toml. With arguments: only what they name to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
rm -f .coverage .coverage.*
# The page of `primeslurm report` is looked at in a real browser.
if [[ -n ${CI:-} && $(id -u) == 0 ]] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
    echo "warning: chromium cannot be installed; the test that needs it is skipped" >&2
fi
# Processes that tests start are measured too, wherever they run.
export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$PWD/.coverage
if (($#)); then
  coverage run -m pytest "$@"
else
  # Tests of clusters mostly wait, for time-outs and for Slurm: they run beside those of single rooms and of engines.
  mkdir -p build
  coverage run -m pytest --durations=20 tests/cluster tests/emulated tests/chaos tests/e2e >build/clusters.log 2>&1 &
  clusters=$!
  coverage run -m pytest --durations=20 tests/unit tests/power >build/unit.log 2>&1 &
  unit=$!
  code=0
  coverage run -m pytest --durations=20 tests/engine tests/gpu tests/trainer || code=$?
  wait $clusters || code=$?
  wait $unit || code=$?
  cat build/clusters.log build/unit.log
  ((code == 0)) || exit "$code"
fi
coverage combine --quiet
coverage report
