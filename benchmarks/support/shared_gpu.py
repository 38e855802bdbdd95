"""Runs whose trainer and engines share the GPUs of this machine, each of which believes that it has one of its own.

What a pool without enough GPUs can show: numbers of trainer and engines beside one another, and what follows a fault.
Seconds are of processes that get in each other's way. NCCL takes a GPU twice from 2.30 on; where torch brings an older
one, policies go by files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.sites import local_site

SETTINGS = {"weights.transport": "filesystem", "weights.timeout_s": "120"}
"""What a recipe has otherwise where there are GPUs enough, and NCCL is older than 2.30."""
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
