#!/usr/bin/env bash
# Lint, and run all tests except campaigns (scripts/campaigns.sh). A failed test is never run again.
# With arguments: lint, and pass the arguments to pytest.
# With --coverage: also measure coverage, and fail if it is too low. That takes half as long again, so a nightly job does it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
# Some tests need a browser and container engines.
if [[ -n ${CI:-} && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  scripts/test_programs.sh || echo "warning: programs that some tests need are not installed; these tests are skipped" >&2
fi
# Compile once what hundreds of processes import, as none of them does so if PYTHONDONTWRITEBYTECODE is set.
python -m compileall -q benchmarks primeslurm scripts tests
unmeasured=(env -u COVERAGE_PROCESS_START -u COVERAGE_FILE)
python=(python)
if [[ ${1:-} == --coverage ]]; then
  shift
  rm -f .coverage .coverage.*
  # Coverage also measures the processes that tests start.
  export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$PWD/.coverage
  python=(coverage run)
fi

# Print the coverage if it was measured.
report() {
  [[ -n ${COVERAGE_FILE:-} ]] || return 0
  coverage combine --quiet
  coverage report
}

if (($#)); then
  "${unmeasured[@]}" just lint
  "${python[@]}" -m pytest "$@"
  report
  exit
fi

components=tests/trainer/components
compiled=$components/test_compile.py
agents=tests/unit/node
declare -A groups=(
  [clusters]="tests/cluster tests/power tests/chaos $agents"
  [emulated]="tests/emulated"
  [engines]="tests/engine tests/gpu"
  [unit]="tests/unit --ignore=tests/unit/orchestrator --ignore=$agents $compiled"
  [trainer]="tests/trainer --ignore=$components"
  [rollouts]="tests/unit/orchestrator $components --ignore=$compiled"
  [runs]="tests/e2e"
)

# run GROUP: run a group of tests, or lint, with its output in build/GROUP.log. Every test has its own time limit
# (pyproject.toml). The limit here ends a process that hangs outside of a test: SIGABRT makes it print its stacks.
run() {
  if [[ $1 == lint ]]; then
    "${unmeasured[@]}" just lint
    return
  fi
  local python=("${python[@]}") paths
  # The tests of single modules already measure what whole runs execute.
  [[ $1 != runs ]] || python=("${unmeasured[@]}" python)
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

# Tests of clusters and agents mostly wait for Slurm and for timeouts, so they run beside the others. Of the others one
# runs per core, the longest first.
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
report
