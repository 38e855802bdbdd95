"""The embedded cluster that these tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.testbed.embedded_slurm.cluster import Cluster, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from tests.cluster.accounting.cluster import PROGRAMS, AccountingCluster
from tests.support.slurm import require_slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with four GPU nodes, two fake GPUs each, and a control node."""
    require_slurm()
    root = tmp_path_factory.mktemp("cluster")
    spec = ClusterSpec("shared", root / "c", root / "runs", nodes=4, gpus_per_node=2, cpus_per_node=8)
    started, _ = up(spec)
    yield started
    started.down()


@pytest.fixture(scope="session")
def lab() -> Iterator[AccountingCluster]:
    """Yield a cluster with slurmdbd, accounts, QOS and preemption, and a hand-written slurm.conf.

    `lab.submit`, `lab.primeslurm` and `lab.as_user` act as an ordinary user; `lab.hold` takes nodes as root.
    """
    require_slurm(PROGRAMS, "slurm-wlm munge slurmdbd mariadb-server")
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # the user must be able to enter it
        cluster = AccountingCluster(directory)
        yield cluster
        cluster.down()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    return directory
