"""Nodes that are lost between their assignment and the start of their processes, with real agents and processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.base.files import read_json
from primeslurm.node.agent.node_agent import NodeAgent
from primeslurm.node.host.network import NetworkError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.plan.model import Plan, Replica
from primeslurm.records.events.nodes import AgentFailed, NodeLost, ProcessesMoved
from primeslurm.records.fleet import AssignmentRecord, Ending, Outcome
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import read_status
from tests.support.plans import SLEEP, plan_of, process, python
from tests.unit.node import test_agent
from tests.unit.node.test_agent import PATIENT, QUICK, Running, server
from tests.unit.node.test_environment_nodes import make_plan, worker

ENGINES = ("engine-0", "engine-1", "engine-2")


class LosingAgent(NodeAgent):
    """An agent whose node is lost when the head assigns it, if its rank is one of `lost`."""

    lost: tuple[int, ...] = ()

    def _follow(self, assignment: AssignmentRecord) -> None:
        if self.rank in self.lost and assignment.node_of(self.rank) is not None:
            self.end(Ending(Outcome.CANCELLED, "lost"))
        else:
            super()._follow(assignment)


Start = Callable[..., Running]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Run a plan without the agents of some ranks, which are lost at their assignment."""
    started: list[Running] = []

    def run(plan: Plan, *lost: int) -> Running:
        monkeypatch.setattr(test_agent, "NodeAgent", LosingAgent)
        monkeypatch.setattr(LosingAgent, "lost", lost)
        started.append(Running(plan, monkeypatch, QUICK, PATIENT))
        return started[-1]

    yield run
    for running in started:
        running.head.end(Ending(Outcome.CANCELLED, "test over"))
        running.join()


def engines(directory: Path, spares: int = 0, **options: object) -> Plan:
    """Return a plan: a router and an engine on node 0, and an engine with these options on nodes 1 and 2."""
    router = server("router", 0, 21000, *ENGINES, after=ENGINES, role="router")
    nodes = ((router, server("engine-0", 0, 21010)), *((server(f"engine-{i}", i, 21020, **options),) for i in (1, 2)))
    replicas = (Replica(index=0, router="router", engines=ENGINES, nodes=(0, 1, 2)),)
    return plan_of(directory / "run", *nodes, spares=spares, replicas=replicas)


def arguments_of(running: Running, name: str) -> list[str]:
    """Return the arguments of a running process, after its program."""
    node = running.head.fleet.plan.process(name).node
    heartbeat = running.attempt.heartbeat(node, running.attempt.assignment())
    assert heartbeat is not None
    return Path(f"/proc/{heartbeat.processes[name].pid}/cmdline").read_text().split("\0")[3:-1]


def router_words(running: Running) -> list[str]:
    """Wait until the router runs, and return its arguments."""
    running.wait(lambda: running.head.ending or running.report("router").state == "ready")
    assert running.head.ending is None
    return arguments_of(running, "router")


def address(running: Running, name: str) -> str:
    addresses = read_json(running.attempt.addresses_file)
    assert addresses is not None
    return f"{addresses['hosts'][name]}:{addresses['ports'][name]['http']}"


@pytest.mark.parametrize(
    ("spares", "options", "ranks", "lost"),
    [
        (0, {}, (1, 2), {"engine-1", "engine-2"}),
        (1, {}, (1, 3), {"engine-1"}),
        (0, {"unit": "g", "restart": "unit"}, (2,), {"engine-1", "engine-2"}),
    ],
    ids=["two", "spare lost, too", "restart group"],
)
def test_a_router_starts_without_the_lost_engines(
    start: Start, tmp_path: Path, spares: int, options: dict[str, object], ranks: tuple[int, ...], lost: set[str]
) -> None:
    running = start(engines(tmp_path, spares, **options), *ranks)
    words = router_words(running)
    assert words[2:] == [address(running, name) for name in ENGINES] and len(set(words[2:])) == len(ENGINES)
    arguments = OrchestratorArguments(running.run.path, 1, "run", "", "", ["router"], ENGINES)
    urls = {name: f"http://{address(running, name)}" for name in ENGINES if name not in lost}
    assert arguments.engine_urls() == urls and arguments.addresses.lost == lost
    for name in urls:
        running.wait_state(name, "ready")
    states = {p.name: p.state for p in read_status(running.run, lambda _: "RUNNING", processes=True).processes}
    assert {name for name in ENGINES if states[name] == "LOST"} == lost
    assert not running.events(AgentFailed)


def test_a_loss_that_ends_the_attempt_leaves_no_agent_with_an_error(start: Start, tmp_path: Path) -> None:
    ranks = [process(f"trainer-rank-{i}", i, role="trainer") for i in (1, 2)]
    uses = process("orchestrator", 0, (*SLEEP, "${host:trainer-rank-1}"), role="orchestrator")
    running = start(plan_of(tmp_path / "run", (uses,), *((rank,) for rank in ranks)), 1)
    ending = running.ended()
    assert ending.outcome is Outcome.FAILED and ending.reason.endswith("its agent ended")
    assert not running.events(AgentFailed) and not running.attempt.addresses_file.exists()


def test_ranks_meet_at_the_spare_that_replaces_the_node_of_rank_0(start: Start, tmp_path: Path) -> None:
    meet = python("import time; time.sleep(600)", "${host:trainer-rank-0}:${port:trainer-rank-0:master}")
    options = {"role": "trainer", "unit": "trainer"}
    ranks = [process(f"trainer-rank-{i}", i + 1, meet, ports={"master": 21500}, **options) for i in (0, 1)]
    orchestrator = process("orchestrator", 0, role="orchestrator")
    running = start(plan_of(tmp_path / "run", (orchestrator,), *((rank,) for rank in ranks), spares=1), 1)
    for rank in ranks:
        running.wait_state(rank.name, "ready")
        assert arguments_of(running, rank.name) == ["127.0.0.4:21500"]
    assert running.head.ending is None


def test_workers_of_nodes_that_are_lost_at_their_assignment_start_elsewhere(start: Start, tmp_path: Path) -> None:
    """The node that gets the first one's worker is lost, too."""
    running = start(make_plan(tmp_path, *((worker(f"w{i}", 2 + i),) for i in range(3))), 3, 4)

    def states() -> dict[str, str]:
        report = running.attempt.heartbeat(2, running.attempt.assignment())
        return {name: process.state for name, process in report.processes.items()} if report else {}

    running.wait(lambda: running.head.ending or states() == {f"w{i}": "ready" for i in range(3)})
    assert running.head.ending is None and len(running.events(ProcessesMoved)) == 2


def test_a_node_whose_fixed_port_was_taken_after_its_preflight_is_not_blamed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[socket.socket] = []
    blamed: list[object] = []
    follow = LosingAgent._follow

    def take(agent: LosingAgent, assignment: AssignmentRecord) -> None:
        if agent.rank == 1 and not held:
            held.append(socket.create_server((agent.address, 21020)))
        follow(agent, assignment)

    monkeypatch.setattr(LosingAgent, "_follow", take)
    monkeypatch.setattr("primeslurm.node.head.head.record_bad_node", lambda *words: blamed.append(words))
    running = start(engines(tmp_path, fixed_ports=("http",)))
    assert len(router_words(running)) == 2 + len(ENGINES)
    held[0].close()
    (event,) = running.events(NodeLost)
    assert (event.rank, blamed) == (1, []) and "port 21020 of 127.0.0.2 is in use" in event.reason
    assert not running.events(AgentFailed)


def test_an_agent_takes_the_address_that_its_preflight_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its node did not resolve for a moment when it started."""

    def fails(*_: object) -> str:
        raise NetworkError("the name vm does not resolve")

    plan = plan_of(tmp_path / "run", (process("engine", 0, SLEEP),))
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan)
    monkeypatch.setattr("primeslurm.node.agent.node_agent.own_address", fails)
    monkeypatch.setattr("primeslurm.node.preflight.preflight.own_address", lambda *_: "127.0.0.9")
    agent = NodeAgent(plan, 0, attempt, "id", plan.python)
    agent._heartbeat(0.0, ended=False)
    assert read_json(attempt.agent_file(0))["address"] == ""  # type: ignore[index]
    agent.preflight._network()
    agent._heartbeat(0.0, ended=False)
    assert read_json(attempt.agent_file(0))["address"] == "127.0.0.9"  # type: ignore[index]
