"""Runs whose trainer and engines share this machine's GPUs, while each assumes its own.

Useful on machines with too few GPUs: trainer and engines can be compared, and faults injected. Timings include mutual
interference. NCCL supports two ranks per GPU from 2.30 on; with older versions policies are transferred as files.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.sites import local_site

FILES = {"weights.transport": "filesystem", "weights.timeout_s": "120"}
STAND_IN = """#!/usr/bin/env bash
# A stand-in for nvidia-smi: tells of a GPU as often as it is shared.
words=()
for word; do [[ $word == --id=* ]] || words+=("$word"); done
for gpu in {gpus}; do {program} --id=$gpu "${{words[@]}}"; done
"""


@dataclass(frozen=True)
class SharedGpus:
    """Settings of a local submission: the site file and environment variables."""

    site: Path
    env: Mapping[str, str]


def nccl_version() -> tuple[int, int]:
    """Return major and minor version of the NCCL that torch loads; (0, 0) if there is none.

    `torch.cuda.nccl.version` returns the version that torch was built with.
    """
    import torch  # noqa: F401 - which loads NCCL

    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return 0, 0
    found = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(found))
    return found.value // 10_000, found.value // 100 % 100


def shared_settings() -> dict[str, str]:
    """Return recipe settings for shared GPUs, by dotted path."""
    return {} if nccl_version() >= (2, 30) else FILES


def shared_gpus(directory: Path, runs: Path, gpus: Sequence[int]) -> SharedGpus:
    """Describe this machine as if it had more GPUs.

    Args:
        directory: directory for a site file, and a fake nvidia-smi that lists each GPU as often as it is shared.
        gpus: this machine's GPUs, in the order in which processes get a node's GPUs.

    Raises:
        RuntimeError: there is no nvidia-smi.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise RuntimeError("no nvidia-smi: this machine has no GPU to share")
    bin_dir = directory / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    stand_in = bin_dir / "nvidia-smi"
    stand_in.write_text(STAND_IN.format(gpus=" ".join(map(str, gpus)), program=program))
    stand_in.chmod(0o755)
    site = local_site(runs)
    kind = site.nodes["default"].model_copy(update={"gpus": len(gpus)})
    file = directory / "site.yaml"
    file.write_text(site.model_copy(update={"nodes": {"default": kind}}).model_dump_json(by_alias=True))
    env = {
        "PATH": os.pathsep.join([str(bin_dir), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    return SharedGpus(file, env)
