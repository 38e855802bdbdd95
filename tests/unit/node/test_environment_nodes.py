"""Lost environment nodes: their workers move."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.api.runs.attach import find_target
from primeslurm.node.head.fleet import Fleet
from primeslurm.node.preflight.preflight import Preflight
from primeslurm.plan.model import HetGroup, Plan, Process, Replica
from primeslurm.records.events.nodes import NodeLost, NodeReplaced, ProcessesMoved
from primeslurm.records.fleet import Ending, Outcome, ProcessReport
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.plan_outline import read_outline
from primeslurm.run.status.run_status import read_status
from tests.support.plans import plan_of, process
from tests.unit.node.fleet_of_agents import Agents
from tests.unit.node.test_agent import PATIENT, QUICK, Running


def worker(name: str, node: int) -> Process:
    return process(name, node, role="environment")


def make_plan(directory: Path, *environments: tuple[Process, ...], spares: int = 0, **options: int) -> Plan:
    """Return a plan: the orchestrator on node 0, an engine on node 1, environment workers on the other nodes."""
    first = ((process("orchestrator", 0, role="orchestrator"),), (process("engine-r0-0", 1, gpus=(0,)),))
    made = plan_of(directory / "run", *first, *environments, spares=spares, **options)
    nodes = [
        node.model_copy(
            update={"group": min(node.index, 2), "role": ("control", "inference", "environments")[min(node.index, 2)]}
        )
        for node in made.nodes
    ]
    group = made.groups[0]
    sizes = ((1, 0), (1, 0), (len(environments) + spares, spares))
    groups = [
        HetGroup(**group.model_dump() | {"index": i, "name": str(i), "nodes": count, "spares": extra})
        for i, (count, extra) in enumerate(sizes)
    ]
    replicas = (Replica(index=0, router="engine-r0-0", engines=("engine-r0-0",), nodes=(1,)),)
    return made.model_copy(update={"nodes": tuple(nodes), "groups": tuple(groups), "replicas": replicas})


class Environments(Agents):
    """Return agents of a plan with environment nodes, after the assignment."""

    def __init__(self, plan: Plan) -> None:
        super().__init__((process("x", 0),))
        self.fleet = Fleet(plan, started_at=0.0)
        self.assigned()

    def lose(self, rank: int, now: float) -> Ending | None:
        """Stop the heartbeats of an agent until it is given up."""
        self.silent.add(rank)
        return self.decide(now) or self.decide(now + 1)

    def homes(self) -> dict[str, int]:
        """Return the rank that runs each worker."""
        workers = [p for p in self.fleet.plan.processes() if p.role == "environment"]
        return {p.name: self.fleet.assignment.rank_of[self.fleet.assignment.home(p)] for p in workers}


def three_nodes(directory: Path, spares: int = 0) -> Plan:
    rows = [tuple(worker(f"w{3 * i + j}", 2 + i) for j in range(3)) for i in range(3)]
    return make_plan(directory, *rows, spares=spares)


def test_workers_of_a_lost_node_move_evenly_to_the_others(tmp_path: Path) -> None:
    agents = Environments(three_nodes(tmp_path))
    assert agents.lose(3, 100.0) is None
    homes = agents.homes()
    assert {name: homes[name] for name in ("w0", "w1", "w2")} == dict.fromkeys(("w0", "w1", "w2"), 2)
    assert sorted(list(homes.values()).count(rank) for rank in (2, 4)) == [4, 5]
    (moved,) = agents.news(ProcessesMoved)
    assert (moved.node, moved.processes, moved.to) == ("n3", ["w3", "w4", "w5"], ["n2", "n4"])
    assert agents.blamed == ["n3"] and not agents.fleet.lost
    assert agents.fleet.report("engine-r0-0") and agents.fleet.report("w4")


def test_moved_workers_move_again_until_the_last_node_is_lost(tmp_path: Path) -> None:
    agents = Environments(three_nodes(tmp_path))
    assert agents.lose(3, 100.0) is None and agents.lose(2, 200.0) is None
    assert set(agents.homes().values()) == {4}
    ending = agents.lose(4, 300.0)
    assert ending is not None and (ending.outcome, ending.suspect) == (Outcome.FAILED, "n4")


def test_a_spare_replaces_a_node_with_the_workers_moved_to_it(tmp_path: Path) -> None:
    agents = Environments(three_nodes(tmp_path, spares=1))
    assert agents.lose(3, 100.0) is None
    assert agents.news(NodeReplaced) == [NodeReplaced("n3", "n5", 3)]
    assert {name: agents.homes()[name] for name in ("w3", "w4", "w5")} == {"w3": 5, "w4": 5, "w5": 5}
    assert agents.lose(2, 200.0) is None
    assert agents.lose(5, 300.0) is None
    assert set(agents.homes().values()) == {4} and sorted(agents.blamed) == ["n2", "n3", "n5"]


@pytest.mark.parametrize("cut_off", [False, True], ids=["dead", "cut-off"])
def test_agents_take_over_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: bool) -> None:
    plan = make_plan(tmp_path, (worker("w0", 2),), (worker("w1", 3),))
    running = Running(plan, monkeypatch, QUICK, PATIENT)
    names = ["orchestrator", "engine-r0-0", "w0", "w1"]
    try:
        before = {name: running.wait_state(name, "ready").pid for name in names}
        lost, left = running.agents[3], running.agents[2]
        if cut_off:  # cut off from the file system, so it learns late that it was replaced
            monkeypatch.setattr(lost, "_read_head", lambda now: None)
        monkeypatch.setattr(lost, "_heartbeat", lambda *_, **__: None)

        def taken() -> object:
            heartbeat = running.attempt.heartbeat(2, running.attempt.assignment())
            return heartbeat and heartbeat.processes.get("w1", ProcessReport("waiting")).pid

        running.wait_silent(3, taken)
        assert taken() != before["w1"] and running.wait_state("w0", "ready").pid == before["w0"]
        where = find_target(read_outline(running.attempt), running.attempt, "w1")
        assert (where.node, where.report.rank) == (2, left.rank)
        shown = {p.name: p.pid for p in read_status(running.run, lambda _: "RUNNING", processes=True).processes}
        assert shown == before | {"w1": taken()}
        assert running.head.ending is None
        assert [event.node for event in running.events(NodeLost)] == [running.events(ProcessesMoved)[0].node]
        if not cut_off:
            running.wait(lambda: not running.threads[3].is_alive())
    finally:
        monkeypatch.undo()
        running.head.end(Ending(Outcome.CANCELLED, "test over"))
        running.join()


def test_preflight_checks_gpus_and_adapters_only_where_they_are_used(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, (worker("w0", 2),)).model_copy(update={"device": "cuda", "hcas": ("mlx5_77",)})
    attempt = RunDirectory(Path(plan.run_dir)).attempt(1)
    attempt.prepare(plan)
    journal = Journal(attempt.path, "agent")
    found = {rank: Preflight(plan, rank, "n", attempt, tmp_path, journal)._gpu() for rank in (1, 2)}
    assert [check.name for check in found[2]] == ["gpus"] and found[2][0].level == "ok"
    assert {"gpus", "hca"} <= {check.name for check in found[1] if check.level == "failed"}
