#!/bin/bash
# A DeepEP wheel into wheels/ of this folder, for Hopper. Run it where CUDA's compiler (of the toolkit, or of PyPI's wheels
# nvidia-cuda-nvcc, nvidia-cuda-runtime, nvidia-cuda-cccl ...), libibverbs' headers and the run's torch are; no GPU is
# needed. The wheel remembers where NCCL (of that environment) and NVSHMEM (of this folder) are.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need git nvcc gcc python3
need_pip
nccl=$(field nccl)
shown=$(python3 -m pip show nvidia-nccl-cu13 2>/dev/null) || true
found=$(sed -n 's/^Version: //p' <<<"$shown")
beside=$(sed -n 's/^Location: //p' <<<"$shown")
if [[ -z $check && $found != "$nccl" ]]; then
    echo "$name: this environment has NCCL ${found:-none}; first: python3 -m pip install --no-deps nvidia-nccl-cu13==$nccl" >&2
    exit 1
fi
fetch_commit
run python3 -m pip install --quiet --upgrade --target="$prefix/nvshmem" "nvidia-nvshmem-cu13==$(field nvshmem)"
cuda=/usr/local/cuda
[[ -n $check ]] || cuda=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
# What the linker looks for and CUDA's wheels lack: libraries without a version in their names, and the driver's. DeepEP
# itself says where NCCL is when it runs, but not when it is linked.
run mkdir -p "$work/link"
run gcc -shared -Wl,-soname,libcuda.so.1 -o "$work/link/libcuda.so" -x c /dev/null
[[ -n $check || -e $cuda/lib64/libcudart.so ]] || run ln -s "$cuda"/lib/libcudart.so.*[0-9] "$work/link/libcudart.so"
run env TORCH_CUDA_ARCH_LIST=9.0 EP_NVSHMEM_ROOT_DIR="$prefix/nvshmem/nvidia/nvshmem" CUDA_HOME="$cuda" \
    CPATH="$cuda/include/cccl${CPATH:+:$CPATH}" LDFLAGS="-L$work/link -L$beside/nvidia/nccl/lib -Wl,--no-as-needed" \
    python3 -m pip wheel --no-build-isolation --no-deps --wheel-dir="$prefix/wheels" "$work/source"
built
