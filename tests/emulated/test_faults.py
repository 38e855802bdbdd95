"""Every fault of the table, and full disks, on a small deployment that all tests share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.base.durable import MIN_FREE_BYTES
from primeslurm.records.events.nodes import FileSystemFault, NodeLost
from primeslurm.run.bad_nodes import BadNodeLedger
from primeslurm.run.history import events
from primeslurm.run.status.run_status import RunStatus
from primeslurm.wire.transport import secret
from tests.emulated.faults import FAULTS, Fault, measure_cost
from tests.support.emulation import NODE_SILENT_S, Deployment
from tests.support.port_messages import FLOOD, MESSAGES, Response, half_open, ports_of, role, send_all
from tests.support.slurm import require_slurm
from tests.support.strangers import attempted, needs_second_user, stranger
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a cluster. The first test starts the run on it."""
    require_slurm()
    made = Deployment(tmp_path_factory.mktemp("faults"))
    yield made
    made.down()


LISTEN = {"router/http", "router/metrics", "router/health", "prefill/http", "decode/http"}
LISTEN |= {"orchestrator/wire", "orchestrator/envs", "head/metrics"}
REFUSALS = {"nothing", "HTTP 400", "HTTP 401", "HTTP 404", "HTTP 501", "ZMTP", "ZMTP CURVE", "ZMTP CURVE ERROR"}
OPEN = {"router/metrics"}
"""Ports that answer without a secret: a router's metrics (see docs/explanation/security.md)."""


def lives(status: RunStatus) -> dict[str, tuple[int | None, int]]:
    """Return process ids and restarts of all processes."""
    return {process.name: (process.pid, process.restarts) for process in status.processes}


@pytest.mark.campaign
@needs_second_user
def test_stranger_at_every_port_learns_and_stops_nothing(deployment: Deployment) -> None:
    run = deployment.running()
    before, ports = deployment.status(), ports_of(run)
    assert {role(port.owner) for port in ports} == LISTEN, ports
    assert {port.host for port in ports}.isdisjoint({"0.0.0.0", "::"}), "each on its node's own address only"
    attack = attempted(lambda: send_all(ports))
    assert attack.succeeded, attack.trace
    answers = [Response(*each) for each in attack.value]
    assert len(answers) == len(ports) * len(MESSAGES)
    assert {each.description for each in answers} >= {"HTTP 400", "HTTP 401", "HTTP 404", "ZMTP CURVE"}, "who answered?"
    assert [each for each in answers if each.description not in REFUSALS and role(each.port) not in OPEN] == []
    shown = "".join(each.text for each in answers)
    assert secret.read(run.path) not in shown and str(run.path) not in shown
    with stranger(lambda: half_open(ports)) as flood:
        assert flood.succeeded and flood.value > FLOOD * len(ports) / 2, flood
        reached = deployment.snapshot().step + 2
        deployment.wait(lambda status: (status.step or 0) >= reached and deployment.healthy(status))
    after = deployment.status()
    assert (after.attempt, lives(after)) == (before.attempt, lives(before)), "something was started again"


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.campaign] if fault.campaign else []) for fault in FAULTS],
)
def test_fault(deployment: Deployment, fault: Fault, record_property: Callable[[str, object], None]) -> None:
    cost = measure_cost(deployment, fault)
    # `python -m benchmarks fault_table` records these
    record_property("cost", json.dumps(cost.row() | {"load_1m": round(os.getloadavg()[0], 1)}))
    assert fault.ends_attempt is None or fault.ends_attempt == (cost.new_attempts > 0), cost
    assert cost.committed_steps_lost == 0 and cost.committed_rollouts_lost == 0, cost
    if cost.new_attempts == 0:
        assert (fault.repeats or cost.steps_repeated == 0) and cost.finished_rollouts_lost == 0, cost


# A full disk for long. The runs of the deployment are in a small file system of their own.


@pytest.fixture
def fill(deployment: Deployment) -> Iterator[Callable[[int], Path]]:
    """Return a function that leaves this many bytes free, and the file that takes the rest."""
    filler = deployment.runs / "filler"

    def leave(free: int) -> Path:
        # the file system is full, so it cannot hold another file
        with contextlib.suppress(OSError), filler.open("ab") as handle:
            while (more := shutil.disk_usage(deployment.runs).free - free) > 0:
                handle.write(b"x" * min(more, 2**20))
                handle.flush()
        return filler

    yield leave
    filler.unlink(missing_ok=True)


def blamed(deployment: Deployment) -> list[str]:
    lost = [event.node for event in events(deployment.run) if isinstance(event, NodeLost)]
    return lost + [entry.node for entry in BadNodeLedger(deployment.runs).entries(time.time())]


def stay_full(fill: Callable[[int], Path], seconds: float) -> None:
    """Keep the file system full, however much space is freed, as other users of a site might."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        fill(0)
        time.sleep(0.5)


@pytest.mark.campaign
def test_preflight_waits_for_disk_space(deployment: Deployment, fill: Callable[[int], Path]) -> None:
    filler = fill(MIN_FREE_BYTES // 2)
    deployment.submit()
    deployment.wait(lambda status: "GiB free" in status.waits_for and status.phase == "starting")
    shown = deployment.command("status", deployment.run.path)
    assert "waits for the shared file system" in shown.stdout, shown
    filler.unlink()
    deployment.wait(lambda status: deployment.healthy(status) and not status.waits_for)
    assert blamed(deployment) == [] and deployment.status().attempt == 1


@pytest.mark.campaign
def test_run_survives_a_full_disk_longer_than_the_head_timeout(
    deployment: Deployment, fill: Callable[[int], Path]
) -> None:
    deployment.running()
    before = deployment.snapshot()
    stay_full(fill, 2.5 * NODE_SILENT_S)
    deployment.wait(lambda status: bool(status.waits_for))
    fill(0).unlink(missing_ok=True)
    noticed = deployment.snapshot()
    deployment.wait(lambda status: deployment.healthy(status) and deployment.snapshot().step > noticed.step + 2)
    after = deployment.snapshot()
    assert blamed(deployment) == []
    assert (after.attempt, before.missing(after)) == (before.attempt, set())
    assert [event.what == "" for event in events(deployment.run) if isinstance(event, FileSystemFault)][-1]


@pytest.mark.campaign
def test_attempt_waits_for_space_on_a_full_disk(deployment: Deployment, fill: Callable[[int], Path]) -> None:
    """Slurm requeues the job until there is space for the attempt's directory, without anybody's help."""
    deployment.running()
    before, job = deployment.snapshot(), deployment.run.latest().job()
    assert job is not None
    stay_full(fill, 2.0)
    deployment.cluster.client.requeue(job.job_id)

    def requeued() -> bool:
        fill(0)
        return restarts(deployment) >= before.attempt

    wait_until(requeued, deployment.status, poll_s=0.5)
    stay_full(fill, 3.0)
    fill(0).unlink(missing_ok=True)
    deployment.wait(lambda status: deployment.healthy(status) and deployment.snapshot().step > before.committed)
    after = deployment.snapshot()
    assert blamed(deployment) == []
    assert (after.attempt, after.committed >= before.committed) == (before.attempt + 1, True)


def restarts(deployment: Deployment) -> int:
    """Return how often Slurm has requeued the job."""
    record = deployment.run.latest().job()
    job = deployment.cluster.client.job(record.job_id) if record else None
    return job.restarts if job is not None and job.state == "RUNNING" else 0
