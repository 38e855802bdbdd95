"""`primeslurm cluster` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import primeslurm
from primeslurm.base.errors import UsageError
from primeslurm.cli.verbs.cluster import app
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from primeslurm.testbed.embedded_slurm.daemons import end

pytestmark = pytest.mark.cluster


def test_up_status_down(cluster: Cluster, tmp_path: Path) -> None:
    where = ["--name", "typed", "--directory", str(tmp_path / "c")]
    options = [*where, "--nodes", "1", "--gpus-per-node", "1", "--cpus-per-node", "2", "--runs", str(tmp_path / "r")]
    run = CliRunner()

    first = run.invoke(app, ["up", *options], catch_exceptions=False)
    assert first.stdout == f"{tmp_path}/c/site.yaml\n"
    assert "cluster typed is up: 2 nodes" in first.stderr
    again = run.invoke(app, ["up", *options], catch_exceptions=False)
    assert again.stdout == first.stdout
    assert "was up already" in again.stderr

    status = json.loads(run.invoke(app, ["status", *where, "--json"], catch_exceptions=False).stdout)
    assert status["up"] is True
    assert status["nodes"] == {"typed-n001": "idle", "typed-c001": "idle"}

    broken = primeslurm.find_cluster("typed", tmp_path / "c")
    assert status["slurm_conf"] == str(broken.spec.slurm_conf)
    assert broken.status().nodes == status["nodes"] and str(broken.spec.site_file) == first.stdout.strip()
    end([daemon for daemon in broken.daemons if daemon.name == "typed-n001"], grace_s=5)
    text = run.invoke(app, ["status", *where], catch_exceptions=False)
    assert text.exit_code == 1
    assert "not up; not running: typed-n001" in text.stdout
    with pytest.raises(UsageError, match="not fully up"):
        run.invoke(app, ["up", *options], catch_exceptions=False)

    assert run.invoke(app, ["down", *where], catch_exceptions=False).exit_code == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no embedded cluster"):
        run.invoke(app, ["status", *where], catch_exceptions=False)
