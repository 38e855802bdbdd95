#!/bin/bash
# The pinned NIXL wheel, verified, into python/ of this folder: for environments that were not made from requirements/.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need python3
need_pip
sha256=$(field sha256)
wheel=$(field wheel)
run python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version=3.11 \
    --platform=manylinux_2_28_x86_64 --dest="$work" "nixl-cu13==$version"
verify "$work/$wheel"
run python3 -m pip install --quiet --no-deps --ignore-requires-python --only-binary=:all: --python-version=3.11 \
    --platform=manylinux_2_28_x86_64 --upgrade --target="$prefix/python" "$work/$wheel"
built
