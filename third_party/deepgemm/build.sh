#!/bin/bash
# A DeepGEMM wheel into wheels/ of this folder. Run it where CUDA's compiler and the run's torch are.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need git nvcc python3
need_pip
fetch_commit
run python3 -m pip wheel --no-build-isolation --no-deps --wheel-dir="$prefix/wheels" "$work/source"
built
