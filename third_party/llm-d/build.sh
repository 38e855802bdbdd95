#!/bin/bash
# The images of llm-d as SIF files in images/ of this folder, each by its digest.
set -euo pipefail
# shellcheck source=third_party/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "$@"

need apptainer
unpinned=
for part in epp sidecar envoy; do
    image=$(field "images.$part.image")
    digest=$(field "images.$part.digest")
    if [[ -z $digest ]]; then
        tag=$(field "images.$part.tag")
        echo "$part: no digest in $manifest; pin it: skopeo inspect --format '{{.Digest}}' docker://$image:$tag" >&2
        unpinned=1
        [[ -n $check ]] || continue
    fi
    run mkdir -p "$prefix/images"
    run apptainer pull --force "$prefix/images/$part.sif" "docker://$image@${digest:-DIGEST}"
done
[[ -n $unpinned && -z $check ]] && exit 1
built
