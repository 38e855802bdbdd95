"""A site file for the machine one sits at, for runs without Slurm."""

from __future__ import annotations

import os
from pathlib import Path

from primeslurm.recipe.site import Network, NodeKind, Site

_NODES = 64
_FAKE_GPUS = 8


def local_site(runs: Path, device_dir: Path = Path("/dev")) -> Site:
    """This machine as a site: its own GPUs, or, without any, CPU processes on pretended ones.

    Every agent gets a loopback address of its own, so that "nodes" may use the same ports.
    """
    gpus = len([path for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    kind = NodeKind(partition="local", gpus=gpus or _FAKE_GPUS, cpus=os.cpu_count() or 1)
    return Site(
        schema=1,
        name="local",
        device="cuda" if gpus else "cpu",
        runs=str(runs),
        nodes={"default": kind},
        network=Network(addresses={f"local-{i}": f"127.77.0.{i + 1}" for i in range(_NODES)}),
    )
