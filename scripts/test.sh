#!/usr/bin/env bash
# All tests with coverage, in one run that fails below the floor in pyproject.toml. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
rm -f .coverage .coverage.*
export COVERAGE_PROCESS_START=$PWD/pyproject.toml
coverage run -m pytest "$@"
coverage combine --quiet
coverage report
