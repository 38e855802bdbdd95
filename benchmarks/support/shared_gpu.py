"""Runs whose trainer and engines share the one GPU of this machine, each of which believes that it has one of its own.

What a pool without enough GPUs can show: numbers of trainer and engines beside one another, and what follows a fault.
Nothing is sent over NCCL, which takes no GPU twice: policies go by files. Seconds are of processes that get in each
other's way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from primeslurm.api.sites import local_site

SETTINGS = {"weights.transport": "filesystem", "weights.timeout_s": "120"}
"""What a recipe has otherwise where there are GPUs enough."""
STAND_IN = """#!/usr/bin/env bash
# A stand-in for nvidia-smi: tells of the one GPU {times} times.
words=()
for word; do [[ $word == --id=* ]] || words+=("$word"); done
for _ in $(seq {times}); do {program} "${{words[@]}}"; done
"""


@dataclass(frozen=True)
class SharedGpu:
    """How `primeslurm submit --local` is called.

    Attributes:
        options: of the command.
        env: variables of its environment.
    """

    options: tuple[str, ...]
    env: Mapping[str, str]


def shared_gpu(directory: Path, runs: Path, times: int) -> SharedGpu:
    """Describe this machine as if it had its GPU several times.

    Args:
        directory: for a site file, and a stand-in for nvidia-smi that tells of the GPU so often.
        runs: directory of all runs.
        times: how often.

    Raises:
        RuntimeError: there is no nvidia-smi.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise RuntimeError("no nvidia-smi: this machine has no GPU to share")
    bin_dir = directory / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    stand_in = bin_dir / "nvidia-smi"
    stand_in.write_text(STAND_IN.format(times=times, program=program))
    stand_in.chmod(0o755)
    site = local_site(runs)
    kind = site.nodes["default"].model_copy(update={"gpus": times})
    file = directory / "site.yaml"
    file.write_text(site.model_copy(update={"nodes": {"default": kind}}).model_dump_json(by_alias=True))
    path = os.pathsep.join([str(bin_dir), os.environ["PATH"]])
    return SharedGpu(("--site", str(file)), {"PATH": path, "CUDA_VISIBLE_DEVICES": ",".join(["0"] * times)})
