"""`primeslurm tenant` on a deployment that does not run."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml

from primeslurm.run.tenants import TenantDirectory, add_tenant, tenants_of
from tests.support.cli import Result, primeslurm
from tests.support.deployments import make_deployment, write_tenant


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """The directory of a deployment for two tenants."""
    return make_deployment(tmp_path)


def tenant(lab: Path, *args: str | Path) -> Result:
    return primeslurm("tenant", *args, cwd=lab.parents[1])


def add(lab: Path, name: str, **changes: object) -> Result:
    return tenant(lab, "add", "lab", write_tenant(lab.parents[1] / f"{name}.yaml", **changes))


def test_add_prints_the_run_directory_and_list_shows_the_tenant(lab: Path) -> None:
    added = add(lab, "alice")
    assert (added.code, added.out) == (0, f"{lab / 'tenants' / 'alice' / 'run'}\n"), added.err
    key = lab / "keys" / "tenant.alice"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and key.read_text() not in added.out + added.err
    listed = tenant(lab, "list", "lab", "--json")
    (row,) = json.loads(listed.out)
    assert (row["name"], row["wanted"], row["state"], row["step"]) == ("alice", "running", "waiting", None)
    assert tenant(lab, "list", "lab").out.splitlines()[1].split()[:2] == ["alice", "waiting"]
    assert tenant(lab, "status", "lab", "alice").out == "alice is waiting\n"


def test_add_names_every_fault_in_one_pass(lab: Path) -> None:
    assert add(lab, "alice").code == 0
    refused = add(
        lab,
        "alice",
        model={"path": "/other"},
        slurm={"time": "1:00:00"},
        seq_len=256,
        max_steps=0,
        trainer={"lora": {"rank": 32}},
        tenant={"router": "http://me:1", "max_inflight": -1},
    )
    assert (refused.code, refused.out) == (2, "")
    for text in (
        *("model: the deployment sets it for all tenants", "slurm: the deployment sets it for all tenants"),
        *("tenant.router: the deployment sets it", "tenant.max_inflight = -1", "max_steps = 0: must be greater than 0"),
        "seq_len = 256: the deployment allows at most 128",
        "trainer.lora.rank = 32: the deployment allows at most 16",
        "name = alice: is a tenant already",
    ):
        assert refused.err.count(text) == 1, (text, refused.err)
    assert [each.name for each in tenants_of(lab)] == ["alice"]


def test_a_full_deployment_admits_a_tenant_after_another_is_removed(lab: Path) -> None:
    assert [add(lab, name).code for name in ("one", "two")] == [0, 0]
    full = add(lab, "three")
    assert full.code == 2 and "already has 2 tenants" in full.err
    assert tenant(lab, "remove", "lab", "one", "--yes").code == 0
    assert (lab / "tenants" / "one" / "tenant.yaml").exists(), "its results are kept"
    again = add(lab, "one")
    assert again.code == 2 and "its results are kept" in again.err
    assert add(lab, "three").code == 0
    assert [row["name"] for row in json.loads(tenant(lab, "list", "lab", "--json").out)] == ["two", "three"]


def test_pause_and_resume_are_recorded_for_the_tenant_host(lab: Path) -> None:
    add(lab, "alice")
    assert tenant(lab, "pause", "lab", "alice").code == 0
    assert TenantDirectory(lab / "tenants" / "alice").wanted == "paused"
    assert tenant(lab, "resume", "lab", "alice").code == 0
    assert TenantDirectory(lab / "tenants" / "alice").wanted == "running"
    unknown = tenant(lab, "pause", "lab", "alicia")
    assert unknown.code == 2 and "lab has no such tenant (did you mean alice?)" in unknown.err


def test_resume_changes_the_disk_quota_within_the_limit_of_the_deployment(lab: Path) -> None:
    for name in ("alice", "bob"):
        file = write_tenant(lab.parents[1] / f"{name}.yaml", tenant={"disk_gb": 1, "weight": 2})
        assert add_tenant(lab, name, file.read_text())
    assert tenant(lab, "resume", "lab", "alice", "--disk-gb", "5").code == 0
    alice, bob = tenants_of(lab)
    assert (alice.name, bob.name) == ("alice", "bob"), "in the order in which they were added"
    assert yaml.safe_load(alice.recipe_file.read_text())["tenant"] == {"disk_gb": 5, "weight": 2}
    refused = tenant(lab, "resume", "lab", "alice", "--disk-gb", "6")
    assert refused.code == 2 and "--disk-gb = 6: the deployment allows at most 5" in refused.err
    refused = add(lab, "carol", tenant={"disk_gb": 6})
    assert refused.code == 2 and "tenant.disk_gb = 6.0: the deployment allows at most 5" in refused.err


def test_key_makes_one_key_for_each_user(lab: Path) -> None:
    first = json.loads(tenant(lab, "key", "lab", "bob", "--json").out)
    assert first["base_url"] is None and first["api_key"].startswith("tml-")
    again = tenant(lab, "key", "lab", "bob")
    assert again.out == f"export TINKER_API_KEY={first['api_key']}\n"
    assert "has no address now" in again.err
    assert json.loads(tenant(lab, "key", "lab", "carol", "--json").out)["api_key"] != first["api_key"]
    assert tenant(lab, "key", "lab", "../bob").code == 2


def test_a_client_never_gets_the_key_of_a_tenant(lab: Path) -> None:
    assert add(lab, "bob").code == 0
    (of_tenant,) = (path.read_text() for path in (lab / "keys").iterdir())
    assert json.loads(tenant(lab, "key", "lab", "bob", "--json").out)["api_key"] != of_tenant
    assert tenant(lab, "key", "lab", "tenant.bob").code == 2


def test_a_run_of_another_task_has_no_tenants(lab: Path) -> None:
    resolved = lab / "recipe.resolved.json"
    recipe = json.loads(resolved.read_text()) | {"task": "serve", "tenants": None}
    resolved.write_text(json.dumps(recipe))
    refused = tenant(lab, "list", "lab")
    assert refused.code == 2 and "is a run of task serve, which has no tenants" in refused.err
