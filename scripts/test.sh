#!/usr/bin/env bash
# All tests with coverage, in one run that fails below the floor in pyproject.toml. Arguments go to pytest.
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
coverage run -m pytest "$@"
coverage combine --quiet
coverage report
