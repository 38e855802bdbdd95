#!/bin/bash
# A DeepEP wheel into wheels/ of this folder, for Hopper. Run it where CUDA's compiler and the run's torch are.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need git nvcc python3
fetch_commit
run python3 -m pip install --quiet --target="$work/nvshmem" "nvidia-nvshmem-cu13==$(field nvshmem)"
run env TORCH_CUDA_ARCH_LIST=9.0 NVSHMEM_DIR="$work/nvshmem/nvidia/nvshmem" \
    python3 -m pip wheel --no-build-isolation --no-deps --wheel-dir="$prefix/wheels" "$work/source"
built
