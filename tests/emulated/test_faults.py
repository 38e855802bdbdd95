"""Every fault of the table, on a small deployment that all of them share."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.emulated.faults import FAULTS, Fault, suffer
from tests.support.emulation import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A cluster; the first test starts the run on it."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs Slurm's daemons and root")
    found = Deployment(tmp_path_factory.mktemp("faults"))
    yield found
    found.down()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(deployment: Deployment, fault: Fault, record_property: Callable[[str, object], None]) -> None:
    cost = suffer(deployment, fault)
    # `python -m benchmarks fault_table` writes these down.
    record_property("cost", json.dumps(cost.row() | {"load_1m": round(os.getloadavg()[0], 1)}))
    assert fault.ends_attempt is None or fault.ends_attempt == (cost.new_attempts > 0), cost
    assert cost.committed_steps_lost == 0 and cost.committed_rollouts_lost == 0, cost
    if cost.new_attempts == 0:
        assert (fault.repeats or cost.steps_repeated == 0) and cost.finished_rollouts_lost == 0, cost
