"""A full file system, on a real Slurm: no node is blamed, and the run waits, reports it, and continues."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from primeslurm.base.durable import MIN_FREE_BYTES
from primeslurm.records.events.nodes import FileSystemFault, NodeLost
from primeslurm.run.bad_nodes import BadNodeLedger
from primeslurm.run.records import events
from tests.support.emulation import Deployment
from tests.support.slurm import require_slurm
from tests.support.waiting import wait_until

SILENT_S = 20
"""Time after which a node counts as lost; twice that for the head."""
pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a cluster whose runs are in a small separate file system."""
    require_slurm()
    found = Deployment(tmp_path_factory.mktemp("full"))
    site = found.cluster.spec.site_file
    site.write_text(yaml.safe_dump(yaml.safe_load(site.read_text()) | {"node_silent_s": SILENT_S}))
    yield found
    found.down()


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


def test_preflight_waits_for_disk_space(deployment: Deployment, fill: Callable[[int], Path]) -> None:
    filler = fill(MIN_FREE_BYTES // 2)
    deployment.submit()
    deployment.wait(lambda status: "GiB free" in status.waits_for and status.phase == "starting")
    told = deployment.command("status", deployment.run.path)
    assert "waits for the shared file system" in told.stdout, told
    filler.unlink()
    deployment.wait(lambda status: deployment.healthy(status) and not status.waits_for)
    assert blamed(deployment) == [] and deployment.status().attempt == 1


def test_run_survives_a_full_disk_longer_than_the_head_timeout(
    deployment: Deployment, fill: Callable[[int], Path]
) -> None:
    deployment.running()
    before = deployment.snapshot()
    stay_full(fill, 2.5 * SILENT_S)
    deployment.wait(lambda status: bool(status.waits_for))
    fill(0).unlink(missing_ok=True)
    noticed = deployment.snapshot()
    deployment.wait(lambda status: deployment.healthy(status) and deployment.snapshot().step > noticed.step + 2)
    after = deployment.snapshot()
    assert blamed(deployment) == []
    assert (after.attempt, before.missing(after)) == (before.attempt, set())
    assert [event.what == "" for event in events(deployment.run) if isinstance(event, FileSystemFault)][-1]


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
