"""The tenant host with real runs, whose deployment does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.api.tenants.recipes import UNKNOWN
from primeslurm.base import durable
from primeslurm.run.directory import CANCEL_NOW, RunDirectory
from primeslurm.run.tenants import TenantDirectory, add_tenant, key_of
from primeslurm.slurm.local.submit import is_running
from tests.support.cli import ROOT
from tests.support.deployments import make_deployment, write_tenant
from tests.support.waiting import wait_until

Host = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    return make_deployment(tmp_path, max_tenants=3)


@pytest.fixture
def start_host(lab: Path) -> Iterator[Host]:
    """Start tenant hosts. Those that run after the test are ended with their tenants."""
    hosts: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "primeslurm.api.tenants.host_process", "--run-dir", str(lab)]
        argv += ["--service", UNKNOWN, "--router", UNKNOWN]
        hosts.append(subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": ROOT}, cwd=lab.parents[1]))
        return hosts[-1]

    yield start
    for host in hosts:
        host.send_signal(signal.SIGUSR1)
        host.send_signal(signal.SIGTERM)
        host.wait(60)


def added(lab: Path, name: str, **changes: object) -> TenantDirectory:
    tenant = add_tenant(lab, name, write_tenant(lab.parents[1] / f"{name}.yaml", **changes).read_text())
    assert tenant is not None
    return tenant


def controller(tenant: TenantDirectory) -> str | None:
    """Return the pid of the tenant's local controller, if it runs."""
    if not tenant.run.exists() or not tenant.run.attempts():
        return None
    attempt = tenant.run.latest()
    job = attempt.job()
    running = job is not None and job.job_id and is_running(attempt.plan(), job.job_id)
    return job.job_id if job is not None and running else None


def test_tenants_run_alone_and_outlive_their_host(lab: Path, start_host: Host) -> None:
    broken = added(lab, "broken", trainer={"lora": {"rank": 64}})
    alice, bob = added(lab, "alice"), added(lab, "bob")
    late = added(lab, "late")
    host = start_host()
    pid = wait_until(lambda: controller(alice))
    wait_until(lambda: controller(bob))
    wait_until(lambda: broken.state().state == "back-off")
    assert "the deployment allows at most 16" in broken.state().reason
    assert (late.state().state, late.state().reason) == ("waiting", "the deployment is full")

    host.kill()
    host.wait()
    bob.want("paused")
    host = start_host()
    wait_until(lambda: bob.state().state == "paused")
    assert controller(bob) is None
    end = bob.run.latest().end()
    assert end is not None and end.outcome == "cancelled"
    assert wait_until(lambda: alice.state().state == "running" and controller(alice)) == pid, "the same run"

    key_of(lab, "broken")
    broken.want("removed")  # makes room
    wait_until(lambda: not (lab / "keys" / "broken").exists())
    wait_until(lambda: controller(late))
    durable.write(RunDirectory(lab).latest().cancel_file, CANCEL_NOW)
    host.send_signal(signal.SIGTERM)
    host.wait()
    wait_until(lambda: [controller(each) for each in (alice, bob, late)] == [None] * 3)
