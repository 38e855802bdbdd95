#!/usr/bin/env bash
# All tests with coverage, in one run that fails below the floor in pyproject.toml. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
rm -f .coverage .coverage.*
# Processes that tests start are measured too, wherever they run.
export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$PWD/.coverage
coverage run -m pytest "$@"
coverage combine --quiet
coverage report
