"""Configuration of an embedded cluster, without daemons."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from primeslurm.base.errors import UsageError
from primeslurm.base.hostlists import expand
from primeslurm.cli.verbs.cluster import app
from primeslurm.recipe.site import Site
from primeslurm.testbed.embedded_slurm import cluster
from primeslurm.testbed.embedded_slurm.config import (
    PLACES,
    ClusterSpec,
    LoopbackPlace,
    addresses,
    gres_conf,
    site,
    slurm_conf,
)
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from tests.support.strangers import needs_second_user, stranger

SPEC = ClusterSpec("demo", Path("/tmp/demo"), Path("/tmp/runs"), nodes=4, gpus_per_node=2, cpus_per_node=8)


def test_cluster_is_loaded_from_its_directory_unless_damaged(tmp_path: Path) -> None:
    daemons = [OsProcess("slurmctld", 7, 1)]
    made = cluster.Cluster(replace(SPEC, directory=tmp_path), LoopbackPlace(3), daemons)
    made._save()
    assert cluster.Cluster.load(tmp_path) == made
    for damaged in ("", '{"spec": 1}'):
        (tmp_path / "cluster.json").write_text(damaged)
        with pytest.raises(UsageError, match=r"cluster\.json in it is damaged"):
            cluster.Cluster.load(tmp_path)


def test_cluster_status_without_a_name_shows_all_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = CliRunner()
    none = run.invoke(app, ["status"])
    assert none.exit_code == 1 and "has no embedded cluster" in none.stderr
    for name in ("demo-7", "emulate-x"):
        directory = cluster.default_directory(name)
        directory.mkdir(parents=True)
        cluster.Cluster(replace(SPEC, name=name, directory=directory), LoopbackPlace(3), [])._save()
    text = run.invoke(app, ["status"])
    assert text.exit_code == 1
    assert all(
        f"directory  {tmp_path}/.primeslurm/clusters/{name}\n" in text.stdout for name in ("demo-7", "emulate-x")
    )
    answer = json.loads(run.invoke(app, ["status", "--json"]).stdout)
    assert [(one["name"], one["up"]) for one in answer["clusters"]] == [("demo-7", False), ("emulate-x", False)]
    assert json.loads(run.invoke(app, ["status", "--name", "demo-7", "--json"]).stdout)["name"] == "demo-7"


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("name", replace(SPEC, name="Demo 1")),
        ("nodes", replace(SPEC, nodes=0)),
        ("nodes", replace(SPEC, nodes=513)),
        ("control_nodes", replace(SPEC, nodes=201, control_nodes=201)),
        ("gpus_per_node", replace(SPEC, gpus_per_node=-1)),
        ("cpus_per_node", replace(SPEC, cpus_per_node=0)),
        ("control_nodes", replace(SPEC, control_nodes=51)),
        ("directory", replace(SPEC, directory=Path("relative"))),
        ("directory", replace(SPEC, directory=Path("/tmp/a b"))),
        ("directory", replace(SPEC, directory=Path("/tmp/" + "x" * 70))),
        ("runs", replace(SPEC, runs=Path("relative"))),
    ],
)
def test_check_refuses(field: str, spec: ClusterSpec) -> None:
    with pytest.raises(UsageError) as caught:
        spec.check()
    assert [violation.field for violation in caught.value.violations] == [field]


def test_check_reports_all_problems_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        replace(SPEC, name="", nodes=0, cpus_per_node=0).check()
    assert [violation.field for violation in caught.value.violations] == ["name", "nodes", "cpus_per_node"]


def test_places_share_no_address_or_port() -> None:
    largest = replace(SPEC, nodes=200, control_nodes=50)
    for a, b in combinations([LoopbackPlace(index) for index in range(PLACES)], 2):
        assert not set(a.ports(largest)) & set(b.ports(largest))
        assert not set(addresses(largest, a).values()) & set(addresses(largest, b).values())


def test_ports_stay_below_those_of_runs() -> None:
    port_base = Site.model_fields["port_base"].default
    narrow = LoopbackPlace(PLACES - 1).ports(replace(SPEC, nodes=200, control_nodes=50))
    wide = LoopbackPlace(PLACES).ports(replace(SPEC, nodes=512, control_nodes=200))
    assert max(narrow) < min(wide) and max(wide) < port_base


def test_large_cluster_uses_the_extra_place() -> None:
    large, place = replace(SPEC, nodes=512, control_nodes=200), LoopbackPlace(PLACES)
    nodes = addresses(large, place)
    assert len(set(nodes.values())) == 712 and len(set(place.ports(large))) == 713
    assert not [address for address in nodes.values() if address.endswith((".0", ".255"))]
    configured: dict[str, tuple[str, int]] = {}
    for line in slurm_conf(large, place, "host", 1000).splitlines():
        if line.startswith("NodeName="):
            fields = dict(word.split("=", 1) for word in line.split())
            prefix, _, last = fields["NodeAddr"].rpartition(".")
            where = [f"{prefix}.{number}" for number in expand(last)]
            ports = [int(port) for port in expand(fields["Port"])]
            configured |= dict(zip(expand(fields["NodeName"]), zip(where, ports, strict=True), strict=True))
    assert {name: address for name, (address, _) in configured.items()} == nodes
    assert sorted(port for _, port in configured.values()) == sorted(place.ports(large))[1:]


@pytest.mark.parametrize("nodes", [1, 2, 200])
def test_every_node_has_its_address_and_port(nodes: int) -> None:
    spec = replace(SPEC, nodes=nodes)
    lines = slurm_conf(spec, LoopbackPlace(3), "host", 1000).splitlines()
    configured: dict[str, str] = {}
    ports: list[int] = []
    for line in lines:
        if line.startswith("NodeName="):
            values = dict(part.split("=", 1) for part in line.split())
            configured |= dict(zip(expand(values["NodeName"]), expand(values["NodeAddr"]), strict=True))
            ports += [int(port) for port in expand(values["Port"])]
    assert configured == addresses(spec, LoopbackPlace(3))
    assert sorted([LoopbackPlace(3).port, *ports]) == sorted(LoopbackPlace(3).ports(spec))


@pytest.mark.parametrize(
    ("nodes", "silent_s", "start_s", "expire_s", "message_s", "threads"),
    [(4, 30, 300, 10, 30, 2), (64, 68, 300, 10, 30, 2), (512, 516, 1032, 516, 516, 10)],
)
def test_time_limits_grow_with_the_cluster(
    nodes: int, silent_s: int, start_s: int, expire_s: int, message_s: int, threads: int
) -> None:
    spec = replace(SPEC, nodes=nodes, control_nodes=4)
    conf = slurm_conf(spec, LoopbackPlace(0), "host", 1000)
    assert f"SlurmdTimeout={silent_s}" in conf.splitlines() and f",cred_expire={expire_s}\n" in conf
    assert f"MessageTimeout={message_s}" in conf.splitlines()
    limits = site(spec, LoopbackPlace(0))
    assert (limits.node_silent_s, limits.node_start_s) == (silent_s, start_s)
    assert spec.munge_threads == threads


def test_nodes_without_gpus_have_no_gres() -> None:
    spec = replace(SPEC, gpus_per_node=0)
    assert gres_conf(spec) == ""
    assert "Gres=" not in slurm_conf(spec, LoopbackPlace(0), "host", 1000)


def test_the_site_file_round_trips() -> None:
    made = site(SPEC, LoopbackPlace(0))
    assert Site.model_validate(yaml.safe_load(yaml.safe_dump(made.model_dump(by_alias=True, mode="json")))) == made
    control, train = made.kind("control"), made.kind("train")
    assert control is not None
    assert train is not None
    assert (control.partition, control.gpus, train.partition, train.gpus) == ("cpu", 0, "gpu", 2)


def test_sockets_of_job_steps_fit_whatever_the_name() -> None:
    for name in ("gpu", "emulate", "a" * 31):
        spec = ClusterSpec(name, Path("/root/.primeslurm/clusters") / name, Path("/runs"), nodes=28)
        spec.check()
        node = spec.gpu_names[-1]
        assert len(f"{spec.directory}/spool/{node}/{node}_99999.4294967291") <= 107
    with pytest.raises(UsageError, match="too long for the Unix sockets"):
        ClusterSpec("emulated", Path("/" + "d" * 60), Path("/runs")).check()


def test_node_names_of_clusters_with_long_names_differ() -> None:
    first, second = (ClusterSpec(f"emulate-glm5-{end}", Path("/a"), Path("/runs")) for end in ("pd", "r3"))
    assert not set(first.gpu_names) & set(second.gpu_names)


@needs_second_user
def test_stranger_cannot_block_the_start_lock() -> None:
    """An abstract socket as lock could be taken by anybody."""
    held: list[Any] = []

    def attack() -> None:
        held.append(socket.socket(socket.AF_UNIX))
        with contextlib.suppress(OSError):  # another process has this port
            held[0].bind("\0primeslurm-cluster-up")
        with contextlib.suppress(PermissionError):
            held.append(cluster._LOCK.open("rb"))
            fcntl.flock(held[1], fcntl.LOCK_EX)
            raise AssertionError("locked")

    with cluster._start_lock():
        pass
    with stranger(attack) as done:
        assert done.succeeded, done.trace
        with cluster._start_lock():
            pass
