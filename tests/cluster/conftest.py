"""The embedded cluster that the tests of this directory share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.slurm.embedded.cluster import Cluster, up
from primeslurm.slurm.embedded.config import ClusterSpec


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four GPU nodes with two fake GPUs each and a control node."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs Slurm's daemons and root")
    root = tmp_path_factory.mktemp("cluster")
    spec = ClusterSpec("shared", root / "c", root / "runs", nodes=4, gpus_per_node=2, cpus_per_node=8)
    started, _ = up(spec)
    yield started
    started.down()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    directory = tmp_path / "run"
    directory.mkdir()
    return directory
