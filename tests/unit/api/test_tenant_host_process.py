"""The tenant host with real runs, whose deployment does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.api.tenants.host_process import HostedTenant, TenantHost
from primeslurm.api.tenants.recipes import UNKNOWN, DeploymentUrls
from primeslurm.base import durable
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import CANCEL_NOW, Attempt, RunDirectory
from primeslurm.run.tenants import TenantDirectory, add_tenant, key_of, user_of
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


def environments(module: str, run_dir: Path) -> list[bytes]:
    """Return the environments that processes of a run, with this module in their command lines, started with."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if module.encode() in words and bytes(run_dir) + b"/" in words.replace(b"\0", b"/"):
                found.append((process / "environ").read_bytes())
    return found


def test_tenants_run_alone_and_outlive_their_host(lab: Path, start_host: Host) -> None:
    broken = added(lab, "broken", trainer={"lora": {"rank": 64}})
    alice, bob = added(lab, "alice"), added(lab, "bob")
    late = added(lab, "late")
    host = start_host()
    pid = wait_until(lambda: controller(alice))
    wait_until(lambda: controller(bob))
    wait_until(lambda: broken.state().state == "back-off")
    keys = [(lab / "secret").read_bytes(), (lab / "keys" / user_of("alice")).read_bytes()]
    started = wait_until(lambda: environments("primeslurm.orchestrator", alice.run.path))
    started += environments("primeslurm", alice.run.path)  # of its controller and agent, too
    assert len(started) > 2
    assert sum(key in text for text in started for key in keys) == 0
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

    client = key_of(lab, "broken")
    broken.want("removed")  # makes room
    wait_until(lambda: not (lab / "keys" / user_of("broken")).exists())
    assert key_of(lab, "broken") == client, "a client of that name keeps its key"
    wait_until(lambda: controller(late))
    durable.write(RunDirectory(lab).latest().cancel_file, CANCEL_NOW)
    host.send_signal(signal.SIGTERM)
    host.wait()
    wait_until(lambda: [controller(each) for each in (alice, bob, late)] == [None] * 3)


def damage(tenant: TenantDirectory) -> None:
    """Give a tenant a run whose state nobody can tell."""
    attempt = tenant.run.attempt(1)
    attempt.prepare(RunDirectory(tenant.path.parents[1]).latest().plan())
    (tenant.run.path / "lock.json").write_text("{}")
    attempt.record_job(JobRecord("1", "local", 1.0, host=socket.gethostname()))
    (attempt.path / "plan.json").write_bytes(b"\xff")


def paused(lab: Path, name: str) -> TenantDirectory:
    tenant = added(lab, name)
    tenant.want("paused")
    return tenant


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_tenant_whose_wanted_state_cannot_be_read_does_not_end_the_host(lab: Path, content: bytes | None) -> None:
    alice, bob, carol = (paused(lab, name) for name in ("alice", "bob", "carol"))
    (carol.path / "wanted").unlink()
    host = TenantHost(lab, DeploymentUrls())
    host.tick(0)
    assert [each.state().state for each in (alice, bob, carol)] == ["paused", "paused", "waiting"]
    alice.want("removed")
    (bob.path / "wanted").unlink() if content is None else (bob.path / "wanted").write_bytes(content)
    host.tick(1)
    assert [each.state().state for each in (alice, bob)] == ["removed", "paused"], "bob keeps the last known value"


def test_a_run_of_unknown_state_counts_as_active_while_the_host_ends(lab: Path) -> None:
    damage(paused(lab, "alice"))
    host = TenantHost(lab, DeploymentUrls())
    assert not host.tick(0)
    host.ending = True
    assert host.tick(1)


def test_a_removed_tenant_is_not_looked_at_once_it_is_recorded(lab: Path, caplog: pytest.LogCaptureFixture) -> None:
    alice = paused(lab, "alice")
    alice.want("removed")
    host = TenantHost(lab, DeploymentUrls())
    host.tick(0)
    assert alice.state().state == "removed"
    damage(alice)
    host.ending = True
    assert not host.tick(1) and not caplog.messages


def test_files_of_a_running_tenant_are_decoded_after_a_change_only(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = paused(lab, "alice")
    hosted, read = HostedTenant(alice), list[int]()
    monkeypatch.setattr(Attempt, "plan", lambda self: read.append(self.number))
    for number in (1, 1, 2, 2):
        hosted.plan(alice.run.attempt(number))
    assert read == [1, 2]
    durable.make_directory(alice.run.path)
    for service in ("http://a:1", "http://b:1"):
        durable.write_json(
            alice.run.path / recipe_record.FILE, {"tenant": {"service": service, "router": "http://r:1"}}
        )
        assert hosted.urls() == hosted.urls() == DeploymentUrls(service, "http://r:1")
