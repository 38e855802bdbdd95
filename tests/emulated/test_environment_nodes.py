"""An emulated run continues after its environment node loses power."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from primeslurm.records.events.nodes import ProcessesMoved
from primeslurm.run.bad_nodes import BadNodeLedger
from primeslurm.run.diagnosis.doctor import diagnose
from primeslurm.run.history import events, rows
from primeslurm.run.status.run_status import RlProgress
from primeslurm.wire.stored import checkpoints
from tests.support.emulation import Deployment
from tests.support.faults import kill_node
from tests.support.slurm import require_slurm

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]
STEPS = 30
SMALLER = (
    f"max_steps={STEPS}",
    "environments=[{id: swe, workers: 6}]",
    "deployment={train: {nodes: 2, gpus_per_node: 1}, environments: {nodes: 3}, "
    "inference: {type: multi_node, nodes_per_replica: 2, gpus_per_node: 1}}",
)


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a cluster with as many nodes as the run needs."""
    require_slurm()
    made = Deployment(tmp_path_factory.mktemp("environments"), gpu_nodes=4, control_nodes=5)
    yield made
    made.down()


def test_lost_environment_node_costs_only_rollouts_in_flight(deployment: Deployment) -> None:
    run = deployment.submit(*(word for setting in SMALLER for word in ("--set", setting)))
    deployment.wait(lambda status: deployment.healthy(status) and deployment.snapshot().step >= 3)
    before = {process.name: process for process in deployment.status().processes}
    lost = before["environment-swe-0"].node
    theirs = {name for name, process in before.items() if process.node == lost}
    assert theirs == {"environment-swe-0", "environment-swe-3"}
    committed = deployment.snapshot().committed
    shown = deployment.status().progress
    assert isinstance(shown, RlProgress) and len(shown.rollouts_by_node) == 3
    kill_node(deployment.cluster, lost)

    moved = deployment.wait(
        lambda status: deployment.healthy(status) and all(process.node != lost for process in status.processes)
    )
    after = {process.name: process for process in moved.processes}
    assert len({after[name].node for name in theirs}) == 2, "each of the two other nodes takes one"
    same = [name for name in before if name not in theirs]
    assert [after[name].pid for name in same] == [before[name].pid for name in same], "nothing else was restarted"

    progress = deployment.wait(lambda status: status.phase == "completed").progress
    assert isinstance(progress, RlProgress)
    counts = progress.counts
    assert counts["lost"] >= 1
    ended = sum(counts.get(how, 0) for how in ("finished", "failed", "cancelled", "lost"))
    assert counts["dispatched"] == ended + progress.inflight
    end = run.attempt(1).end()
    assert end is not None and (end.outcome, end.committed_step) == ("completed", STEPS)
    assert [attempt.number for attempt in run.attempts()] == [1]
    assert set(checkpoints.committed(run.path)) >= {committed, STEPS}
    trained = rows(run.path)
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1)), "no step was trained twice"
    assert max(row["staleness/max"] for row in trained) <= 8
    assert [set(event.processes) for event in events(run) if isinstance(event, ProcessesMoved)] == [theirs]
    assert {entry.node for entry in BadNodeLedger(deployment.runs).entries(time.time())} == {lost}, "it alone is blamed"
    diagnosis = diagnose(run, run.attempt(1), lambda _: None)
    assert [failure.component for failure in diagnosis.recovered] == [f"node {lost}"] and diagnosis.first is None
