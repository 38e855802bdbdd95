"""Runs whose trainer and engines share the GPUs of this machine, each of which believes that it has one of its own.

What a pool without enough GPUs can show: numbers of trainer and engines beside one another, and what follows a fault.
Seconds are of processes that get in each other's way. NCCL takes a GPU twice from 2.30 on; where an older one is
loaded, policies go by files.
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
    """How a local run is submitted.

    Attributes:
        site: its file.
        env: variables of the environment.
    """

    site: Path
    env: Mapping[str, str]


def nccl_version() -> tuple[int, int]:
    """Ask the NCCL that torch loads for its version; `torch.cuda.nccl.version` tells that which torch was built with.

    Returns:
        Major and minor; (0, 0) where there is none.
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
    """Return what a recipe has otherwise where processes share GPUs, by dotted path."""
    return {} if nccl_version() >= (2, 30) else FILES


def shared_gpus(directory: Path, runs: Path, gpus: Sequence[int]) -> SharedGpus:
    """Describe this machine as if it had more GPUs than it has.

    Args:
        directory: for a site file, and a stand-in for nvidia-smi that tells of a GPU as often as it is shared.
        runs: directory of all runs.
        gpus: those of this machine, in the order in which a node's GPUs are given to processes.

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
