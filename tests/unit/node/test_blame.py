"""Blame for unfit nodes, and the nodes that a job must avoid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.node.head.blame import Fault, whose_fault
from primeslurm.node.head.fleet import Fleet, News
from primeslurm.plan.model import HetGroup, Plan, Process
from primeslurm.records.events.nodes import NodeLost
from primeslurm.records.fleet import AgentReport, Ending, Outcome, PreflightState
from primeslurm.run.bad_nodes import BadNode, excludable_nodes, excluded, write_excluded
from primeslurm.run.diagnosis.failures import FILE_SYSTEM
from tests.support.plans import plan_of, python

FULL = "0.10 GiB free in the run directory /runs/x"


def report(rank: int, *failed: str, file_system: str = "", checking: bool = False) -> AgentReport:
    state = PreflightState.CHECKING if checking else PreflightState.UNFIT if failed else PreflightState.FIT
    return AgentReport(
        rank,
        f"n{rank}",
        f"10.0.0.{rank}",
        0.0,
        1,
        fitness=state,
        unfit_because="; ".join(failed),
        failed=list(failed),
        file_system=file_system,
    )


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        ((), Fault.ALIKE),
        ((report(1),), Fault.NODE),
        ((report(1, "model"),), Fault.ALIKE),
        ((report(1, "model", "gpus"),), Fault.ALIKE),
        ((report(1, "gpus"),), Fault.NODE),
        ((report(1, "model"), report(2, checking=True)), Fault.OPEN),
        ((report(1, checking=True), report(2)), Fault.NODE),
        ((report(1, "model"), report(2, "model")), Fault.ALIKE),
    ],
)
def test_a_failure_on_all_nodes_of_a_kind_blames_none(others: tuple[AgentReport, ...], fault: Fault) -> None:
    agents = {0: report(0, "model"), **{other.rank: other for other in others}}
    everybody = range(len(agents))
    assert whose_fault(0, agents, everybody, everybody) is fault
    if len(agents) == 1:
        assert whose_fault(0, agents, (0, 1), (0, 1)) is Fault.OPEN, "the other node has not reported"


@pytest.mark.parametrize(
    ("failed", "others", "fault"),
    [
        (["model"], [report(1)], Fault.NODE),
        (["model"], [report(1, "model"), report(2, "model", "gpus")], Fault.ALIKE),
        (["model"], [report(1, "model"), report(2, "gpus")], Fault.NODE),
        (["versions"], [report(1, "versions"), report(2, checking=True)], Fault.OPEN),
        (["address"], [report(1, "address"), report(2, "address")], Fault.ALIKE),
        (["address"], [report(1, "address"), report(2)], Fault.NODE),
        (["shared file system", "gpus"], [report(1, "shared file system")], Fault.ALIKE),
        (["gpus"], [report(1, "gpus")], Fault.NODE),
        (["space"], [report(1, "space")], Fault.NODE),
        (["gpus"], [], Fault.NODE),
    ],
)
def test_the_only_node_of_its_kind_is_compared_with_all_others(
    failed: list[str], others: list[AgentReport], fault: Fault
) -> None:
    agents = {0: report(0, *failed), **{other.rank: other for other in others}}
    assert whose_fault(0, agents, (0,), range(len(agents))) is fault


def test_a_full_disk_blames_no_node() -> None:
    agents = {0: report(0, "space", file_system=FULL), 1: report(1)}
    assert whose_fault(0, agents, (0, 1), (0, 1)) is Fault.FILE_SYSTEM


def fleet_of(*sizes: int, **options: int) -> Fleet:
    """Return a fleet of groups of these sizes, with one process per node."""
    count = sum(sizes)
    work = [(Process(name=f"p{i}", role="engine", node=i, argv=python("pass"), log=f"{i}.log"),) for i in range(count)]
    plan = plan_of(Path("/runs/x"), *work, **options)
    if len(sizes) > 1:
        group_of = [index for index, size in enumerate(sizes) for _ in range(size)]
        groups = [plan.groups[0].model_copy(update={"index": i, "nodes": size}) for i, size in enumerate(sizes)]
        nodes = [node.model_copy(update={"group": group_of[node.index]}) for node in plan.nodes]
        plan = plan.model_copy(update={"groups": tuple(groups), "nodes": tuple(nodes)})
    return Fleet(plan, started_at=0.0, hosts=[f"n{rank}" for rank in range(count)])


def decide(fleet: Fleet, now: float, *reports: AgentReport) -> Ending | None:
    for each in reports:
        fleet.observe(each, now)
    return fleet.decide(now)


def blamed(fleet: Fleet) -> list[str]:
    return [item.blamed for item in fleet.news if item.blamed]


def test_a_run_waits_for_a_full_disk_and_continues() -> None:
    fleet = fleet_of(2)
    waiting = [report(rank, file_system=FULL, checking=True) for rank in (0, 1)]
    for now in range(0, 900, 60):
        assert decide(fleet, now, *waiting) is None
        assert fleet.waits_for == FULL
    assert decide(fleet, 1000.0, report(0), report(1)) is None
    assert fleet.waits_for == "" and fleet.assignment.generation == 1 and not blamed(fleet)


def test_the_end_of_the_wait_for_a_full_disk_blames_no_node() -> None:
    fleet = fleet_of(3)
    ending = decide(fleet, 1.0, *(report(rank, "space", file_system=FULL) for rank in range(3)))
    assert ending is not None and (ending.outcome, ending.suspect) == (Outcome.FAILED, FILE_SYSTEM)
    assert fleet.news == []


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((3,), "all 3 nodes of its kind fail alike, so none is excluded"),
        ((1, 1), "all 2 nodes of the job fail alike, so none is excluded"),
        ((1,), "the job has no other node to compare it with, so it is not excluded"),
    ],
)
def test_a_failure_on_all_nodes_ends_the_attempt_and_blames_none(sizes: tuple[int, ...], why: str) -> None:
    fleet = fleet_of(*sizes)
    reports = [report(rank, "model") for rank in range(sum(sizes))]
    assert len(reports) == 1 or decide(fleet, 1.0, reports[0]) is None, "the others have not reported"
    ending = decide(fleet, 2.0, *reports)
    assert ending is not None and (ending.outcome, ending.suspect) == (Outcome.FAILED, "all nodes alike")
    assert ending.reason == f"preflight failed on n0: model ({why})" and fleet.news == []


@pytest.mark.parametrize(
    ("failed", "final"), [("address", True), ("model", True), ("versions", True), ("shared file system", False)]
)
def test_a_failure_on_all_nodes_ends_the_run_if_it_lasts(failed: str, final: bool) -> None:
    ending = decide(fleet_of(1, 1), 1.0, report(0, failed), report(1, failed))
    assert ending is not None and ending.final is final


@pytest.mark.parametrize(("sizes", "spares"), [((1, 1), 0), ((2,), 1)])
def test_the_only_unfit_node_is_blamed(sizes: tuple[int, ...], spares: int) -> None:
    fleet = fleet_of(*sizes, spares=spares)
    reports = [report(0), report(1, "model"), report(2)][: fleet.plan.allocated]
    ending = decide(fleet, 1.0, *reports)
    assert spares or (ending is not None and ending.suspect == "n1")
    assert fleet.news[0] == News(NodeLost("n1", 1, "model"), "n1")


NO_PYTHON = "Exited with exit code 2"


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1, 1), (1, 2, 1)])
def test_agents_that_start_nowhere_but_on_the_heads_node_blame_no_node(sizes: tuple[int, ...]) -> None:
    fleet = fleet_of(*sizes)
    fleet.observe(report(0), 0.0)
    names = fleet.hosts[1:]
    fleet.observe_exits({names[0]: NO_PYTHON}, 1.0)
    fleet.decide(1.0)
    assert fleet.gone == {}, "the others may still start"
    fleet.observe_exits(dict.fromkeys(names, NO_PYTHON), 2.0)
    ending = fleet.decide(2.0)
    assert ending is not None and NO_PYTHON in ending.reason and blamed(fleet) == []


def test_an_agent_that_starts_on_one_node_blames_the_others() -> None:
    fleet = fleet_of(1, 3)
    fleet.observe(report(0), 0.0)
    fleet.observe_exits({"n1": NO_PYTHON, "n2": NO_PYTHON}, 1.0)
    fleet.observe(report(3), 2.0)
    fleet.observe_exits({}, 2.0)
    assert blamed(fleet) == ["n1", "n2"]


@pytest.mark.parametrize(("heard", "names"), [((), []), ((3,), ["n1", "n2"])])
def test_late_nodes_are_blamed_if_others_of_their_kind_are_in_time(heard: tuple[int, ...], names: list[str]) -> None:
    fleet = fleet_of(1, 3)
    for rank in (0, *heard):
        fleet.observe(report(rank), 1.0)
    fleet.decide(fleet.plan.node_start_s + 1.0)
    assert blamed(fleet) == names


def bad(node: str, time: float) -> BadNode:
    return BadNode(node, "silent", "other", 1, time, time + 1e6)


def plan(*needed: tuple[str, int], nodelist: str | None = None, exclude: str | None = None) -> Plan:
    groups = tuple(
        HetGroup(index=i, name=str(i), nodes=n, spares=0, partition=p, gres=None, cpus_per_task=1, nodelist=nodelist)
        for i, (p, n) in enumerate(needed)
    )
    made = plan_of(Path("/runs/x"), ())
    return made.model_copy(update={"groups": groups, "job": made.job.model_copy(update={"exclude": exclude})})


def up(*names: str) -> Mapping[str, bool]:
    return dict.fromkeys(names, True)


SIX = up(*(f"n{i}" for i in range(6)))
BAD = [bad(f"n{i}", float(i)) for i in range(6)]


def names(found: list[BadNode]) -> list[str]:
    return [entry.node for entry in found]


def test_only_nodes_that_can_be_spared_are_excluded() -> None:
    assert names(excludable_nodes(plan(("gpu", 4)), BAD, {"gpu": SIX})) == ["n5", "n4"], "the newest entries count"
    assert excludable_nodes(plan(("gpu", 6)), BAD, {"gpu": SIX}) == []
    assert excludable_nodes(plan(("gpu", 9)), BAD, {"gpu": SIX}) == []


def test_excluding_nodes_that_are_down_leaves_enough_when_they_return() -> None:
    """A job that has to wait for one of the nodes must not exclude both."""
    down = {**SIX, "n4": False, "n5": False}
    assert names(excludable_nodes(plan(("gpu", 5)), BAD[4:], {"gpu": down})) == ["n5"]
    assert names(excludable_nodes(plan(("gpu", 4)), BAD[4:], {"gpu": down})) == ["n5", "n4"]


def test_requested_nodes_are_not_excluded() -> None:
    some = {**SIX, "n0": False, "n1": False}
    assert names(excludable_nodes(plan(("gpu", 3)), BAD, {"gpu": some})) == ["n5", "n1", "n0"]
    assert names(excludable_nodes(plan(("gpu", 1), nodelist="n[4-5]"), BAD, {"gpu": SIX})) == ["n3", "n2", "n1", "n0"]
    assert names(excludable_nodes(plan(("gpu", 4), exclude="n5"), BAD, {"gpu": SIX})) == ["n5", "n4"]
    assert names(excludable_nodes(plan(("gpu", 1)), [bad("elsewhere", 1.0)], {"gpu": SIX})) == []


def test_partitions_that_share_nodes_are_counted_together() -> None:
    partitions = {"a": up("n0", "n1", "n2"), "b": up("n1", "n2", "n3")}
    assert names(excludable_nodes(plan(("a", 2), ("b", 2)), BAD[:4], partitions)) == []
    assert names(excludable_nodes(plan(("a", 2), ("b", 1)), BAD[:4], partitions)) == ["n3"]


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.booleans())
    ),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=3),
    st.sets(st.integers(0, 7)),
)
def test_exclusion_never_makes_a_job_impossible(
    partitions: dict[str, dict[str, bool]], needed: list[tuple[str, int]], failed: set[int]
) -> None:
    """A job that finds nodes without exclusions finds them with them, now, and when all nodes are back."""

    def fits(gone: set[str], all_up: bool) -> bool:
        slots = [p for p, n in needed for _ in range(n)]
        taken: dict[str, int] = {}

        def place(slot: int, tried: set[str]) -> bool:
            for node, works in partitions.get(slots[slot], {}).items():
                if (works or all_up) and node not in gone and node not in tried:
                    tried.add(node)
                    if node not in taken or place(taken[node], tried):
                        taken[node] = slot
                        return True
            return False

        return all(place(slot, set()) for slot in range(len(slots)))

    found = excludable_nodes(plan(*needed), [bad(f"n{i}", float(i)) for i in failed], partitions)
    for all_up in (False, True):
        assert fits({entry.node for entry in found}, all_up) or not fits(set(), all_up)


def test_excluded_nodes_are_recorded(tmp_path: Path) -> None:
    assert excluded(tmp_path) == []
    write_excluded(tmp_path, BAD[:2])
    assert excluded(tmp_path) == BAD[:2]
