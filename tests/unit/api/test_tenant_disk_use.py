"""Disk use of tenants, measured from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.api.tenants.disk_use import DiskMonitor, measure
from primeslurm.api.tenants.host import DiskUse
from primeslurm.base.files import write_json
from primeslurm.recipe.sections.tenant_deployment import Tenants
from primeslurm.run.tenants import SESSIONS_FILE, TenantDirectory, add_tenant
from tests.support.deployments import make_deployment, write_tenant


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    return make_deployment(tmp_path)


def added(lab: Path, name: str, **section: float) -> TenantDirectory:
    tenant = add_tenant(lab, name, write_tenant(lab.parent / f"{name}.yaml", tenant=section).read_text())
    assert tenant is not None
    return tenant


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_use_is_that_of_the_run_and_of_its_checkpoints_in_the_service(lab: Path) -> None:
    alice = added(lab, "alice", disk_gb=0.5)
    before = measure(alice, lab, Tenants()).used
    write(alice.run.path / "checkpoints" / "step_000001" / "file", 1000)
    for session in ("one", "two", "of-bob"):
        write(lab / "tinker" / "checkpoints" / f"{session}:train:0" / "weights" / "step_000001.safetensors", 100)
    write(lab / "tinker" / "checkpoints" / "two:train:0" / "external_weights" / "v000001" / "adapter", 10)
    sessions = alice.run.path / SESSIONS_FILE
    write_json(sessions, ["one", "two"])
    assert measure(alice, lab, Tenants()) == DiskUse(before + 1210 + sessions.stat().st_size, 0.5e9)


def test_quota_of_the_deployment_is_the_default(lab: Path) -> None:
    alice, bob = added(lab, "alice"), added(lab, "bob", disk_gb=2)
    monitor = DiskMonitor(lab, Tenants(disk_gb=3))
    monitor.measure_all()
    assert [monitor.uses[each.name].quota for each in (alice, bob)] == [3e9, 2e9]
    assert measure(alice, lab, Tenants()) == DiskUse(), "without a quota, nothing is measured"


def test_damaged_recipe_of_one_tenant_does_not_hide_the_others(lab: Path) -> None:
    alice, bob = added(lab, "alice", disk_gb=1), added(lab, "bob", disk_gb=1)
    alice.recipe_file.write_text("tenant: [")
    monitor = DiskMonitor(lab, Tenants())
    monitor.measure_all()
    assert list(monitor.uses) == [bob.name]
