#!/bin/bash
# A DeepEP wheel into wheels/ of this folder, for Hopper. Run it where CUDA's compiler, libibverbs' headers and the run's
# torch are. The wheel remembers where NCCL (of that environment) and NVSHMEM (of this folder) are.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need git nvcc python3
nccl=$(field nccl)
found=$(python3 -m pip show nvidia-nccl-cu13 2>/dev/null | sed -n 's/^Version: //p') || true
if [[ -z $check && $found != "$nccl" ]]; then
    echo "$name: this environment has NCCL ${found:-none}; first: pip install --no-deps nvidia-nccl-cu13==$nccl" >&2
    exit 1
fi
fetch_commit
run python3 -m pip install --quiet --upgrade --target="$prefix/nvshmem" "nvidia-nvshmem-cu13==$(field nvshmem)"
run env TORCH_CUDA_ARCH_LIST=9.0 EP_NVSHMEM_ROOT_DIR="$prefix/nvshmem/nvidia/nvshmem" \
    python3 -m pip wheel --no-build-isolation --no-deps --wheel-dir="$prefix/wheels" "$work/source"
built
