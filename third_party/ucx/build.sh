#!/bin/bash
# UCX into this folder. primeslurm puts third_party/ucx/lib first on LD_LIBRARY_PATH of every job.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need curl tar make gcc
fetch_tarball
options=(--prefix="$prefix" --enable-mt --disable-doxygen-doc --without-go --without-java)
[[ -d /usr/include/infiniband ]] && options+=(--with-verbs --with-rdmacm --with-mlx5)
[[ -n ${CUDA_HOME:-} ]] && options+=(--with-cuda="$CUDA_HOME")
run cd "$work/source"
run ./contrib/configure-release "${options[@]}"
run make -j "$(nproc)"
run make install
built
