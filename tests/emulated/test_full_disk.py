"""A file system without space, on the real Slurm: no node is blamed, the run waits, says so, and goes on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.records.events.nodes import FileSystemFault, NodeLost
from primeslurm.records.reserve import LEAST_FREE
from primeslurm.run.ledger import Ledger
from primeslurm.run.records import events
from tests.support.emulation import NODE_SILENT_S, Deployment

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A cluster; its runs are in a small file system of their own."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs Slurm's daemons and root")
    found = Deployment(tmp_path_factory.mktemp("full"))
    yield found
    found.down()


@pytest.fixture
def fill(deployment: Deployment) -> Iterator[Callable[[int], Path]]:
    """Leave so many bytes free; the file that takes the rest."""
    filler = deployment.runs / "filler"

    def leave(free: int) -> Path:
        with filler.open("ab") as handle:
            while (more := shutil.disk_usage(deployment.runs).free - free) > 0:
                try:
                    handle.write(b"x" * min(more, 2**20))
                    handle.flush()
                except OSError:
                    break
        return filler

    yield leave
    filler.unlink(missing_ok=True)


def blamed(deployment: Deployment) -> list[str]:
    lost = [event.node for event in events(deployment.run) if isinstance(event, NodeLost)]
    return lost + [entry.node for entry in Ledger(deployment.runs).entries(time.time())]


def test_too_little_space_to_begin_is_waited_for(deployment: Deployment, fill: Callable[[int], Path]) -> None:
    filler = fill(LEAST_FREE // 2)
    deployment.submit()
    deployment.wait(lambda status: "GiB free" in status.waits_for and status.phase == "starting")
    told = deployment.command("status", deployment.run.path)
    assert "waits for the shared file system" in told.stdout, told
    filler.unlink()
    deployment.wait(lambda status: deployment.healthy(status) and not status.waits_for)
    assert blamed(deployment) == [] and deployment.status().attempt == 1


def test_a_disk_that_is_full_for_longer_than_a_head_may_be_silent(
    deployment: Deployment, fill: Callable[[int], Path]
) -> None:
    deployment.running()
    before = deployment.snapshot()
    began = time.monotonic()
    while time.monotonic() < began + 2.5 * NODE_SILENT_S:  # again and again: others of a site take what is given up
        fill(0)
        time.sleep(0.5)
    deployment.wait(lambda status: bool(status.waits_for))
    fill(0).unlink()
    noticed = deployment.snapshot()
    deployment.wait(lambda status: deployment.healthy(status) and deployment.snapshot().step > noticed.step + 2)
    after = deployment.snapshot()
    assert blamed(deployment) == []
    assert (after.attempt, before.groups.keys() - after.groups.keys() - after.trained) == (before.attempt, set())
    assert [event.what == "" for event in events(deployment.run) if isinstance(event, FileSystemFault)][-1]
