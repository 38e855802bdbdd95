"""Every fault of the table, on a small deployment that all tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

from primeslurm.run.status.run_status import RunStatus
from primeslurm.wire.transport import secret
from tests.emulated.faults import FAULTS, Fault, measure_cost
from tests.support.emulation import Deployment
from tests.support.port_messages import FLOOD, MESSAGES, Response, half_open, ports_of, role, send_all
from tests.support.slurm import require_slurm
from tests.support.strangers import attempted, needs_second_user, stranger

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a cluster. The first test starts the run on it."""
    require_slurm()
    found = Deployment(tmp_path_factory.mktemp("faults"))
    yield found
    found.down()


LISTEN = {"router/http", "router/metrics", "router/health", "prefill/http", "decode/http"}
LISTEN |= {"orchestrator/wire", "orchestrator/envs"}
REFUSALS = {"nothing", "HTTP 400", "HTTP 401", "HTTP 404", "ZMTP", "ZMTP CURVE", "ZMTP CURVE ERROR"}
OPEN = {"router/metrics"}
"""Ports that answer without a secret: a router's metrics (see docs/explanation/security.md)."""


def lives(status: RunStatus) -> dict[str, tuple[int | None, int]]:
    """Return process ids and restarts of all processes."""
    return {process.name: (process.pid, process.restarts) for process in status.processes}


@needs_second_user
def test_stranger_at_every_port_learns_and_stops_nothing(deployment: Deployment) -> None:
    run = deployment.running()
    before, found = deployment.status(), ports_of(run)
    assert {role(port.owner) for port in found} == LISTEN, found
    assert {port.host for port in found}.isdisjoint({"0.0.0.0", "::"}), "each on its node's own address only"
    asked = attempted(lambda: send_all(found))
    assert asked.succeeded, asked.trace
    answers = [Response(*each) for each in asked.value]
    assert len(answers) == len(found) * len(MESSAGES)
    assert {each.description for each in answers} >= {"HTTP 400", "HTTP 401", "HTTP 404", "ZMTP CURVE"}, "who answered?"
    assert [each for each in answers if each.description not in REFUSALS and role(each.port) not in OPEN] == []
    shown = "".join(each.text for each in answers)
    assert secret.read(run.path) not in shown and str(run.path) not in shown
    with stranger(lambda: half_open(found)) as flood:
        assert flood.succeeded and flood.value > FLOOD * len(found) / 2, flood
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
