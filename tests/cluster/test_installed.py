"""`primeslurm doctor` on the nodes of a real cluster."""

from __future__ import annotations

import json

import pytest

from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.cli import primeslurm

pytestmark = pytest.mark.cluster


def test_doctor_asks_every_node(cluster: Cluster) -> None:
    where = ("--site", str(cluster.spec.directory / "site.yaml"))
    result = primeslurm("doctor", *where, "--all", "--json", cwd=cluster.spec.directory)
    nodes = json.loads(result.out)["nodes"]
    assert len(nodes) == 5
    assert len({json.dumps(parts) for parts in nodes.values()}) == 1  # all nodes are this host
    assert next(iter(nodes.values()))["vllm-router"] == "0.1.17"
    assert result.code == 0, result.err

    one = sorted(nodes)[0]
    table = primeslurm("doctor", *where, "--node", one, cwd=cluster.spec.directory)
    assert table.code == 0 and one in table.out

    wrong = primeslurm("doctor", *where, "--node", one + "x", cwd=cluster.spec.directory)
    assert wrong.code == 2 and f"did you mean {one}?" in wrong.err
