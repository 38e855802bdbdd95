#!/usr/bin/env bash
# Lint, and run all tests with coverage except campaigns (scripts/campaigns.sh). A failed test is never run again.
# With arguments: lint, and pass the arguments to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
rm -f .coverage .coverage.*
# Some tests need a browser and container engines.
if [[ -n ${CI:-} && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  scripts/test_programs.sh || echo "warning: programs that some tests need are not installed; these tests are skipped" >&2
fi
# Compile once what hundreds of processes import, as none of them does so if PYTHONDONTWRITEBYTECODE is set.
python -m compileall -q benchmarks primeslurm scripts tests
# Coverage also measures the processes that tests start.
export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$PWD/.coverage

lint=(env -u COVERAGE_PROCESS_START -u COVERAGE_FILE just lint)
if (($#)); then
  "${lint[@]}"
  coverage run -m pytest "$@"
  coverage combine --quiet
  exec coverage report
fi

components=tests/trainer/components
compiled=$components/test_compile.py
declare -A groups=(
  [clusters]="tests/cluster tests/power tests/chaos"
  [emulated]="tests/emulated"
  [engines]="tests/engine tests/gpu"
  [unit]="tests/unit --ignore=tests/unit/orchestrator $compiled"
  [trainer]="tests/trainer --ignore=$components"
  [rollouts]="tests/unit/orchestrator $components --ignore=$compiled"
  [runs]="tests/e2e"
)

# run GROUP: run a group of tests, or lint, with its output in build/GROUP.log. Every test has its own time limit
# (pyproject.toml). The limit here ends a process that hangs outside of a test: SIGABRT makes it print its stacks.
run() {
  if [[ $1 == lint ]]; then
    "${lint[@]}"
    return
  fi
  local python=(coverage run) paths
  # The tests of single modules already measure what whole runs execute.
  [[ $1 != runs ]] || python=(env -u COVERAGE_PROCESS_START python)
  read -ra paths <<<"${groups[$1]}"
  timeout --foreground --signal=ABRT --kill-after=60 "${PRIMESLURM_TEST_LIMIT:-40m}" \
    "${python[@]}" -m pytest --durations=20 -o cache_dir="build/pytest-$1" "${paths[@]}"
}

declare -A running=() # process id to group
failed=() computing=0
mkdir -p build
rm -rf build/pytest-*

start() {
  run "$1" >"build/$1.log" 2>&1 &
  running[$!]=$1
}

# Wait until one group has ended.
reap() {
  local pid code=0 group
  wait -n -p pid || code=$?
  group=${running[$pid]}
  unset "running[$pid]"
  [[ $group == clusters || $group == emulated ]] || computing=$((computing - 1))
  echo "$group ended with $code after $SECONDS s"
  if ((code)); then
    failed+=("$group")
    tail -n 200 "build/$group.log" # now, because a later group may hang
  fi
}

# Tests of clusters mostly wait for Slurm and for timeouts, so they run beside the others. Of the others one runs per
# core, the longest first.
start clusters
start emulated
for group in lint engines unit trainer rollouts runs; do
  while ((computing >= $(nproc))); do reap; done
  start "$group"
  computing=$((computing + 1))
done
while ((${#running[@]})); do reap; done

cat build/{lint,clusters,emulated,engines,unit,trainer,runs,rollouts}.log
if ((${#failed[@]})); then
  logs=("${failed[@]/#/build/}")
  tail -n 80 "${logs[@]/%/.log}" # how each failed group ended, because only the end of a long output may be kept
  echo "failed: ${failed[*]} (see build/*.log)" >&2
  exit 1
fi
coverage combine --quiet
coverage report
