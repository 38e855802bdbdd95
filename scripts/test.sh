#!/usr/bin/env bash
# Lint and all tests with coverage, which fail below the floor in pyproject.toml. With arguments: only what they name to
# pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
rm -f .coverage .coverage.*
# The report's page is looked at in a real browser, and rollouts are played in real containers.
if [[ -n ${CI:-} && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  scripts/test_programs.sh || echo "warning: programs that some tests need are not installed; these tests are skipped" >&2
fi
# Processes that tests start are measured too, wherever they run.
export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$PWD/.coverage

# group NAME PATH... [OPTION...]: run some of the tests. What failed is kept apart from that of groups beside it.
# Every test has its own time-out. A process that hangs after the last one, or in a way that no time-out ends, prints
# the stacks of its threads (pytest's faulthandler), so that whoever waits for the whole run knows what hung.
group() {
  local python=(coverage run)
  # What whole runs do is measured where the tests of its parts do it.
  [[ $1 != runs ]] || python=(env -u COVERAGE_PROCESS_START python)
  timeout --foreground --signal=ABRT --kill-after=60 "${PRIMESLURM_TEST_LIMIT:-78m}" \
    "${python[@]}" -m pytest --durations=20 -o cache_dir="build/pytest-$1" "${@:2}"
}

lint=(env -u COVERAGE_PROCESS_START -u COVERAGE_FILE just lint)
if (($#)); then
  "${lint[@]}"
  coverage run -m pytest "$@"
else
  # Tests of clusters mostly wait, for time-outs and for Slurm: they run beside those of single rooms and of engines.
  mkdir -p build
  rm -rf build/pytest-*
  clusters=(clusters tests/cluster tests/emulated tests/power)
  runs=(runs tests/e2e tests/chaos)
  compiled=tests/trainer/components/test_compile.py
  rollouts=(rollouts tests/unit/orchestrator tests/trainer/components "--ignore=$compiled")
  unit=(unit tests/unit --ignore=tests/unit/orchestrator "$compiled")
  engines=(engines tests/engine tests/gpu tests/trainer --ignore=tests/trainer/components)
  group "${engines[@]}" >build/engines.log 2>&1 &
  engines_pid=$!
  group "${runs[@]}" >build/runs.log 2>&1 &
  runs_pid=$!
  group "${unit[@]}" >build/unit.log 2>&1 &
  unit_pid=$!
  group "${clusters[@]}" >build/clusters.log 2>&1 &
  clusters_pid=$!
  failed=()
  # Lint, most of which is one process, comes before the group that takes least time.
  "${lint[@]}" || failed+=("lint $?")
  group "${rollouts[@]}" || failed+=("rollouts $?")
  wait $engines_pid || failed+=("engines $?")
  wait $runs_pid || failed+=("runs $?")
  wait $unit_pid || failed+=("unit $?")
  wait $clusters_pid || failed+=("clusters $?")
  cat build/engines.log build/runs.log build/unit.log build/clusters.log
  unstable=0
  for each in "${failed[@]}"; do
    read -r name code <<<"$each"
    [[ $name != lint && $code == 1 ]] || exit "$code"
    unstable=$((unstable + $(python -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' \
      "build/pytest-$name/v/cache/lastfailed")))
    declare -n paths=$name
    echo "== Run again, with nothing beside them: tests of $name that failed above. One that passes now needs mending, too. =="
    group "${paths[@]}" --last-failed --last-failed-no-failures none
  done
  echo "== Run again: $unstable tests. =="
fi
coverage combine --quiet
coverage report
