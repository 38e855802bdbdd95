"""Agents and head during outages of the file system, and with wall clocks that jump."""

from __future__ import annotations

import errno
import json
import time
from functools import partial
from pathlib import Path

import pytest

from primeslurm.base import files
from primeslurm.node.agent.node_agent import NodeAgent
from primeslurm.node.head.head import Head
from primeslurm.records.events.nodes import FileSystemFault
from primeslurm.records.fleet import AgentReport, Ending, Outcome
from primeslurm.records.state import TrainerState
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events as all_events
from tests.support.faulty_storage import FakeTime, FaultyStorage, once
from tests.support.plans import plan_of, process

NODE_SILENT_S = 30


class Nodes:
    """A head and two agents without processes, whose monotonic clock the test advances."""

    def __init__(self, root: Path) -> None:
        plan = plan_of(root / "run", (process("a", 0),), (process("b", 1),), node_silent_s=NODE_SILENT_S)
        self.run = RunDirectory(root / "run")
        self.attempt = self.run.attempt(1)
        self.attempt.prepare(plan)
        self.agents = [NodeAgent(plan, rank, self.attempt, "test-id", plan.python) for rank in (0, 1)]
        self.head = Head(self.agents[0], self.run)
        self.now = time.monotonic()
        for agent in self.agents:
            agent.preflight._done = True

    def tick(self, seconds: float = 1.0) -> None:
        """Let seconds pass. Agents and head tick after each of them."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for agent in self.agents:
                agent.tick(self.now)
            self.head.tick(self.now)

    @property
    def well(self) -> bool:
        endings = [self.head.ending, *(agent.ending for agent in self.agents)]
        return endings == [None] * 3 and self.head.fleet.gone == {}

    def heartbeat(self, rank: int) -> AgentReport:
        report = files.read_json(self.attempt.agent_file(rank))
        assert report is not None
        return AgentReport(rank, report["name"], "", report["time"], report["agent_pid"], report["number"])


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr("primeslurm.node.agent.node_agent.own_address", lambda *_: "127.0.0.1")
    monkeypatch.setattr("primeslurm.node.agent.process_manager.ProcessManager._start", lambda *_: None)
    made = Nodes(tmp_path)
    made.tick(3)
    assert made.well and made.head.fleet.assignment.generation
    return made


@pytest.mark.parametrize("step_s", [-86400.0 * 3, 900.0])
def test_a_wall_clock_that_jumps_loses_no_node(step_s: float, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    for each in (nodes.agents[1], nodes.head, nodes.agents[0]):
        each.wall = lambda: real() + step_s
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
        before = nodes.heartbeat(1).number, json.loads(nodes.attempt.fleet_file.read_text())["time"]
        nodes.tick(2 * NODE_SILENT_S + 10)
        assert nodes.well
        assert nodes.heartbeat(1).number > before[0] + NODE_SILENT_S / nodes.head.plan.heartbeat_s
        assert json.loads(nodes.attempt.fleet_file.read_text())["time"] != before[1]


def test_a_node_without_heartbeats_is_lost(nodes: Nodes) -> None:
    agent = nodes.agents.pop()
    nodes.tick(NODE_SILENT_S + 2)
    assert agent.rank in nodes.head.fleet.gone


def test_a_wall_clock_that_stops_loses_no_node(nodes: Nodes) -> None:
    for each in (*nodes.agents, nodes.head):
        each.wall = partial(float, 1000.0)
    nodes.tick(2 * NODE_SILENT_S + 10)
    assert nodes.well


def test_a_suspended_machine_loses_no_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7 * 86400.0)
    nodes.tick(5)
    assert nodes.well


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ESHUTDOWN, errno.EREMOTEIO])
def test_every_file_operation_of_every_agent_may_fail_twice(number: int, nodes: Nodes, tmp_path: Path) -> None:
    nodes.attempt.path.joinpath("state", "trainer-rank-0.json").write_text(json.dumps({"step": 1}))
    for _ in range(5):
        with FaultyStorage(tmp_path, once(number, number)).installed():
            nodes.tick(3)
    assert nodes.well


@pytest.mark.parametrize(
    ("names", "number"),
    [
        ("cancel", errno.ESTALE),
        ("state/trainer-rank-0.json", errno.EIO),
        ("state/orchestrator.json", errno.ESTALE),
        ("fleet.json", errno.EIO),
        ("agents", errno.ESTALE),
    ],
)
def test_a_file_that_cannot_be_read_for_a_while_ends_nothing(
    names: str, number: int, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.attempt.path.joinpath("state", "trainer-rank-0.json").write_text(json.dumps({"step": 1}))
    away = FaultyStorage(tmp_path, lambda operation, path: number if names in path else None)
    with away.installed():
        nodes.tick(2 * NODE_SILENT_S + 30)
        assert nodes.well
    nodes.tick(5)
    assert nodes.well and nodes.head.fleet.waits_for == "" == nodes.head._waits_for
    nodes.attempt.cancel_file.touch()
    nodes.tick(1)
    assert nodes.head.ending == Ending(Outcome.CANCELLED, "cancelled by the user")


def test_the_head_reports_that_the_run_waits_for_its_file_system(nodes: Nodes, tmp_path: Path) -> None:
    with FaultyStorage(tmp_path, lambda operation, path: errno.EIO if "cancel" in path else None).installed():
        nodes.tick(3)
        fleet = nodes.attempt.fleet()
        assert fleet is not None and "Input/output error" in fleet.waits_for and "cancel" in fleet.waits_for
    nodes.tick(3)
    fleet = nodes.attempt.fleet()
    assert fleet is not None and fleet.waits_for == ""
    faults = [event.what for event in all_events(nodes.run) if isinstance(event, FileSystemFault)]
    assert len(faults) == 2 and faults[1] == ""


def test_an_unreadable_heartbeat_excuses_its_node_for_a_limited_time(nodes: Nodes, tmp_path: Path) -> None:
    excuse_s = int(1.5 * nodes.head.plan.stall_timeout_s)
    away = FaultyStorage(tmp_path, lambda operation, path: errno.EIO if path.endswith("agents/1.json") else None)
    with away.installed():
        for _ in range(2):
            nodes.now += 1.0
            nodes.head.tick(nodes.now)
        nodes.head._unreadable_since = {1: nodes.now - excuse_s}
        for _ in range(NODE_SILENT_S + 2):
            nodes.now += 1.0
            nodes.agents[0].tick(nodes.now)
            nodes.head.tick(nodes.now)
    assert list(nodes.head.fleet.gone) == [1]


def test_a_tick_does_not_wait_long_for_a_file_system(nodes: Nodes, tmp_path: Path, storage_time: FakeTime) -> None:
    with FaultyStorage(tmp_path, lambda operation, path: errno.EIO).installed():
        for tick in (nodes.agents[1].tick, nodes.head.tick):
            nodes.now += 1.0
            began = storage_time.now
            tick(nodes.now)
            assert storage_time.now - began < 10.0
    assert nodes.well


def test_a_process_starts_once_its_log_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primeslurm.node.agent.node_agent.own_address", lambda *_: "127.0.0.1")
    nodes = Nodes(tmp_path)
    with FaultyStorage(tmp_path, lambda operation, path: errno.EIO if path.endswith("a.log") else None).installed():
        nodes.tick(5)
        processes = nodes.agents[0].processes
        assert processes is not None and processes.supervised["a"].state == "waiting"
    try:
        nodes.tick(2)
        assert processes.supervised["a"].running and processes.supervised["a"].restarts == 0
    finally:
        for agent in nodes.agents:
            assert agent.processes is not None
            agent.processes.kill()
            agent.processes.close()


def test_an_unreadable_state_is_an_error(nodes: Nodes, tmp_path: Path) -> None:
    with FaultyStorage(tmp_path, lambda operation, path: errno.ESTALE if operation == "open" else None).installed():
        with pytest.raises(OSError, match="Stale file handle"):
            nodes.attempt.end()
        with pytest.raises(OSError, match="Stale file handle"):
            nodes.attempt.state("trainer-rank-0", TrainerState)
