"""The pure state machines of agents and head, with an injected clock."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.api.loading import load
from primeslurm.node.agent.node_context import UnknownPlaceholder, resolve
from primeslurm.node.agent.supervision import BACKOFF_S, ProcessState, Supervision
from primeslurm.node.attempt.attempt_end import fruitful_preemptions, fruitless, should_requeue
from primeslurm.node.head.fleet import SPARE_WAIT_S, VERDICT_S, Fleet
from primeslurm.node.head.process_states import FleetState, fleet_state
from primeslurm.plan.model import Health, Plan, Process, Replica
from primeslurm.records.events.nodes import NodeLost, ProcessesGivenUp, ProcessesRestarted
from primeslurm.records.fleet import AgentReport, Ending, Outcome, PreflightState, ProcessReport, RestartOrder
from primeslurm.records.record import Event
from primeslurm.wire import exit_codes
from primeslurm.wire.transport.addresses import Addresses
from tests.support.plans import plan_of

E = TypeVar("E", bound=Event)


def process(
    role: str = "engine",
    restart: str = "in_place",
    name: str = "p",
    health: bool = True,
    node: int = 0,
    unit: str | None = None,
) -> Process:
    return Process.model_validate(
        {
            "name": name,
            "role": role,
            "node": node,
            "argv": ("x",),
            "log": "x.log",
            "unit": unit,
            "restart": "unit" if unit else restart,
            "max_restarts": 2,
            "health": Health(port="http", start_timeout_s=60, hang_timeout_s=30) if health else None,
        }
    )


READY = ProcessReport(state="ready", healthy=True)
DONE = ProcessReport(state="done", exit_code=0)


class Agents:
    """Agents that report to a fleet, by hand."""

    def __init__(
        self, *nodes: tuple[Process, ...], spares: int = 0, replicas: tuple[Replica, ...] = (), node_start_s: int = 300
    ) -> None:
        plan = plan_of(
            Path("/runs/x"), *nodes, spares=spares, stall_timeout_s=100, replicas=replicas, node_start_s=node_start_s
        )
        self.fleet = Fleet(plan, started_at=0.0)
        self.now = 0.0
        self.silent: set[int] = set()
        self.unfit: dict[int, str] = {}
        self.checking: set[int] = set()
        self.environments: dict[int, str] = {}
        self.states: dict[str, ProcessReport] = {}

    def heartbeat(self, now: float) -> None:
        """A heartbeat of every agent that is not silent; each takes the place that the fleet gives it."""
        self.now = now
        for rank in set(range(self.fleet.plan.allocated)) - self.silent:
            node = self.fleet.assignment.node_of(rank)
            names = [p.name for p in self.fleet.plan.nodes[node].processes] if node is not None else []
            fitness = PreflightState.UNFIT if rank in {*self.unfit, *self.environments} else PreflightState.FIT
            fitness = PreflightState.CHECKING if rank in self.checking else fitness
            report = AgentReport(
                rank=rank,
                name=f"n{rank}",
                address=f"10.0.0.{rank}",
                time=0.0,
                agent_pid=1,
                number=round(1000 * now),
                fitness=fitness,
                unfit_because=self.unfit.get(rank, "") or self.environments.get(rank, ""),
                environments_fail=self.environments.get(rank, ""),
                node=node,
                processes={name: self.states.get(name, READY) for name in names},
            )
            self.fleet.observe(report, now)

    def decide(self, now: float) -> Ending | None:
        self.heartbeat(now)
        return self.fleet.decide(now)

    def assigned(self) -> Fleet:
        assert self.decide(0.0) is None
        self.heartbeat(0.0)
        assert self.fleet.assembled
        return self.fleet

    def news(self, kind: type[E]) -> list[E]:
        return [item.event for item in self.fleet.news if isinstance(item.event, kind)]


def test_nodes_with_the_same_address_end_the_run_and_no_node_is_to_blame() -> None:
    agents = Agents((process(),), (process(name="q", node=1),))
    agents.fleet.plan = agents.fleet.plan.model_copy(update={"executor": "slurm"})
    agents.heartbeat(0.0)
    for rank in (0, 1):
        same = msgspec.structs.replace(agents.fleet.agents[rank], address="172.17.0.1")
        agents.fleet.observe(same, 0.0)
    ending = agents.fleet.decide(0.0)
    assert ending is not None and (ending.outcome, ending.suspect, ending.final) == ("failed", "network", True)
    assert "nodes n0 and n1 both have the address 172.17.0.1" in ending.reason
    assert agents.news(NodeLost) == []


def test_a_process_starts_loads_serves_and_backs_off() -> None:
    s = Supervision(process())
    assert s.tick(0, prerequisites=False, ready=False) == "nothing"
    assert s.tick(1, prerequisites=True, ready=False) == "start"
    s.started(1)
    s.tick(5, prerequisites=True, ready=True)
    assert s.state is ProcessState.READY
    s.exited(10, -9, ending=False)
    assert (s.state, s.restarts) == (ProcessState.BACKOFF, 1)
    assert s.tick(10 + BACKOFF_S[0] - 0.1, prerequisites=True, ready=False) == "nothing"
    assert s.tick(10 + BACKOFF_S[0], prerequisites=True, ready=False) == "start"


def test_a_process_that_never_answers_is_killed() -> None:
    s = Supervision(process())
    s.started(0)
    assert s.tick(60, prerequisites=True, ready=False) == "nothing"
    assert s.tick(61, prerequisites=True, ready=False) == "kill"
    assert s.reason == "not ready within 1 min"


@pytest.mark.parametrize(
    ("restart", "code", "ending", "expected"),
    [
        ("in_place", 0, False, ProcessState.BACKOFF),
        ("unit", 1, False, ProcessState.FALLEN),
        ("in_place", 1, False, ProcessState.BACKOFF),
        ("in_place", exit_codes.STALLED, False, ProcessState.FAILED),
        ("attempt", 1, False, ProcessState.FAILED),
        ("attempt", 0, False, ProcessState.FAILED),
        ("in_place", 1, True, ProcessState.STOPPED),
    ],
)
def test_what_an_exit_means(restart: str, code: int, ending: bool, expected: ProcessState) -> None:
    s = Supervision(process(restart=restart))
    s.started(0)
    s.exited(1, code, ending=ending)
    assert s.state is expected


def test_a_process_without_a_server_may_be_done() -> None:
    s = Supervision(process("trainer", "attempt", health=False))
    s.started(0)
    s.exited(1, 0, ending=False)
    assert s.state is ProcessState.DONE


def test_a_ready_process_that_gives_no_answer_hangs() -> None:
    s = Supervision(process())
    s.started(0)
    s.tick(5, prerequisites=True, ready=True)
    assert s.tick(40, prerequisites=True, ready=False) == "nothing"
    assert s.tick(41, prerequisites=True, ready=False, unresponsive="unresponsive: silent for 31 s") == "dump_and_kill"
    assert s.tick(42, prerequisites=True, ready=False, unresponsive="unresponsive: silent for 32 s") == "nothing", (
        "it is being ended"
    )
    assert s.reason == "unresponsive: silent for 31 s"


def test_what_is_ended_to_be_renewed_starts_again_at_once_and_for_free() -> None:
    s = Supervision(process())
    s.started(0)
    assert s.renew("moved") == "kill"
    assert s.renew("moved") == "nothing"
    s.exited(1, -9, ending=False)
    assert (s.state, s.restarts) == (ProcessState.WAITING, 0)
    assert s.tick(1, prerequisites=True, ready=False) == "start"


def test_a_member_of_a_restart_group_follows_its_generation() -> None:
    s = Supervision(process(unit="u"))
    s.started(0)
    held, free = RestartOrder(1, hold=True), RestartOrder(1, hold=False)
    assert s.tick(1, prerequisites=True, ready=True, order=held) == "kill"
    s.exited(2, -9, ending=False)
    assert s.tick(3, prerequisites=True, ready=False, order=held) == "nothing"
    assert s.tick(4, prerequisites=True, ready=False, order=free) == "start"
    s.started(4, generation=1)
    assert s.tick(5, prerequisites=True, ready=True, order=free) == "nothing"
    s.exited(6, 1, ending=False)
    assert s.tick(99, prerequisites=True, ready=False, order=free) == "nothing"
    assert s.tick(99, prerequisites=True, ready=False, order=RestartOrder(2, hold=False)) == "start"


@given(st.lists(st.sampled_from([1, -9, -11]), min_size=1, max_size=10))
def test_restarts_are_bounded(codes: list[int]) -> None:
    s, now, starts = Supervision(process()), 0.0, 0
    for code in codes:
        now += 100
        if s.tick(now, prerequisites=True, ready=False) == "start":
            s.started(now)
            starts += 1
            s.exited(now, code, ending=False)
    assert starts <= 1 + s.process.max_restarts


@pytest.mark.parametrize(
    ("report", "suspect", "expected"),
    [
        (None, False, FleetState.STARTING),
        (ProcessReport(state="loading"), False, FleetState.LOADING),
        (ProcessReport(state="ready", healthy=False), False, FleetState.STALE),
        (READY, False, FleetState.HEALTHY),
        (READY, True, FleetState.SUSPECT),
        (ProcessReport(state="backoff"), False, FleetState.RESTARTING),
        (ProcessReport(state="failed"), False, FleetState.LOST),
        (ProcessReport(state="done"), False, FleetState.DONE),
    ],
)
def test_operators_words(report: ProcessReport | None, suspect: bool, expected: FleetState) -> None:
    assert fleet_state(process(), report, suspect=suspect, silent=False, lost=False) is expected
    assert fleet_state(process(), report, suspect=suspect, silent=False, lost=True) is FleetState.LOST


@pytest.mark.parametrize("code", [0, 1])
def test_a_trainer_rank_starts_again_with_a_new_generation_of_its_group(code: int) -> None:
    s = Supervision(process("trainer", "attempt", health=False))
    s.started(0.0)
    s.exited(1.0, code, ending=False)
    for order in (None, RestartOrder(0, hold=False), RestartOrder(1, hold=True)):
        assert s.tick(2.0, prerequisites=True, ready=False, order=order) == "nothing"
    assert s.tick(2.0, prerequisites=True, ready=False, order=RestartOrder(1, hold=False)) == "start"


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (1, "ValueError: line 7 of data.jsonl has no messages", "ValueError: line 7 of data.jsonl has no messages"),
        (-9, "a line of its log", ""),  # killed: its log says nothing of that
    ],
)
def test_of_ranks_that_die_together_one_with_an_error_of_its_own_is_named(code: int, reason: str, error: str) -> None:
    agents = Agents(*((process("trainer", "attempt", f"trainer-rank-{i}", node=i),) for i in (0, 1)))
    agents.assigned()
    lost = ProcessReport("failed", exit_code=-9 if code < 0 else 1, reason="RuntimeError: Connection closed by peer")
    agents.states = {"trainer-rank-0": lost, "trainer-rank-1": ProcessReport("failed", exit_code=code, reason=reason)}
    ending = agents.decide(1.0)
    assert ending is not None and ending.error == error
    assert ending.suspect == ("trainer-rank-1" if error else "trainer-rank-0")


def test_a_dead_trainer_is_dead_not_lost() -> None:
    report = ProcessReport(state="failed")
    assert fleet_state(process("trainer", "attempt"), report, suspect=False, silent=True, lost=False) is FleetState.DEAD


def test_nodes_go_to_fit_agents_in_order_and_the_rest_are_spares() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),), spares=1)
    agents.unfit = {1: "GPU 3 has 2 uncorrected ECC errors"}
    fleet = agents.assigned()
    assert fleet.assignment.rank_of == {0: 0, 1: 2}
    assert agents.news(NodeLost) == [NodeLost("n1", 1, "GPU 3 has 2 uncorrected ECC errors")]
    assert [item.blamed for item in fleet.news] == ["n1", None]
    assert fleet.decide(1.0) is None


def test_without_a_spare_a_node_that_is_not_fit_ends_the_attempt() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),))
    agents.unfit = {1: "no space"}
    assert agents.decide(1.0) == Ending(Outcome.FAILED, "node n1: no space", "n1")


def test_the_head_s_own_node_has_no_spare() -> None:
    agents = Agents((process(name="a"),), spares=1)
    agents.unfit = {0: "no space"}
    assert agents.decide(1.0) == Ending(Outcome.FAILED, "node n0: no space", "n0")


def test_a_spare_that_is_late_is_not_waited_for_long() -> None:
    agents = Agents((process(name="a"),), spares=1)
    agents.silent = {1}
    assert agents.decide(1.0) is None and not agents.fleet.assignment.generation
    assert agents.decide(2.0 + SPARE_WAIT_S) is None
    assert agents.fleet.assignment.rank_of == {0: 0}


@pytest.mark.parametrize(
    ("how", "name", "why"),
    [("silent", "rank 1", "no sign of its agent"), ("checking", "n1", "its preflight has not ended")],
)
def test_a_node_that_is_not_ready_in_the_plan_s_time_ends_the_attempt(how: str, name: str, why: str) -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),), node_start_s=1000)
    setattr(agents, how, {1})
    assert agents.decide(1000.0) is None
    assert agents.decide(1001.0) == Ending(Outcome.FAILED, f"node {name}: {why} within 16 min 40 s", name)


def test_an_agent_that_is_killed_in_preflight_is_not_waited_for() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),))
    agents.fleet.hosts = ("n0", "n1")
    agents.checking = {1}
    assert agents.decide(1.0) is None
    agents.silent = {1}
    agents.fleet.observe_kills({"n1": "Segmentation fault"})
    reason = "node n1: its agent was killed: Segmentation fault"
    assert agents.decide(2.0) == Ending(Outcome.FAILED, reason, "n1")


def test_a_spare_that_never_reports_is_a_bad_node_in_the_end() -> None:
    agents = Agents((process(name="a"),), spares=1)
    agents.fleet.hosts = ("n0", "n1")
    agents.silent = {1}
    for now in (0.0, 1.0, 2.0 + SPARE_WAIT_S, 301.0):
        assert agents.decide(now) is None
    assert [item.blamed for item in agents.fleet.news if isinstance(item.event, NodeLost)] == ["n1"]


def test_a_node_whose_agent_cannot_be_started_is_not_waited_for() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),), spares=1)
    agents.fleet.hosts = ("n0", "n1", "n2")
    agents.silent = {1}
    assert agents.decide(0.0) is None and not agents.fleet.assignment.generation
    exit_codes = {
        "n1": "Exited with exit code 127",
        "n2": "Exited with exit code 1",
    }  # n2 has reported: it is known anyway
    agents.fleet.observe_exits(exit_codes, 1.0)
    agents.fleet.observe_exits(exit_codes, 2.0)
    assert agents.decide(2.0) is None
    assert agents.fleet.assignment.rank_of == {0: 0, 1: 2}
    reason = "no agent could be started: Exited with exit code 127"
    assert agents.news(NodeLost) == [NodeLost("n1", 1, reason)]
    assert [item.blamed for item in agents.fleet.news] == ["n1", None]


def test_hundreds_of_lost_nodes_do_not_make_hundreds_of_reasons() -> None:
    agents = Agents(*((process(name=f"p{node}", node=node),) for node in range(300)))
    agents.fleet.hosts = [f"n{node}" for node in range(300)]
    agents.silent = set(range(1, 300))
    agents.decide(0.0)
    agents.fleet.observe_exits({f"n{node}": "Job credential expired" for node in range(1, 300)}, 1.0)
    ending = agents.decide(1.0)
    assert ending is not None and ending.reason.count("Job credential expired") == 4
    assert ending.reason.endswith("; and 295 nodes more") and len(agents.news(NodeLost)) == 299


def test_a_node_whose_agent_was_killed_is_replaced_at_once() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),), spares=1)
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(1.0) is None and fleet.gone == {}
    fleet.observe_kills({"n1": "Killed"})
    assert agents.decide(1.5) is None
    assert fleet.gone == {1: "node n1: its agent was killed: Killed"} and fleet.assignment.rank_of == {0: 0, 1: 2}


def test_a_silent_node_ends_the_attempt_and_is_named() -> None:
    agents = Agents((process(name="a"),), (process(name="b", node=1),))
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(90.0) is None
    assert agents.decide(91.0) == Ending(Outcome.FAILED, "node n1: has been silent for 91 s", "n1")
    assert fleet.gone == {1: "node n1: has been silent for 91 s"}


def replica(index: int, *engines: str) -> Replica:
    return Replica(index=index, router=f"router-{index}", engines=engines, nodes=())


def two_replicas(**options: int) -> Agents:
    """Control, and two nodes with an engine and its router each."""
    nodes = [
        (process(name=f"engine-r{i}-0", node=i + 1), process("router", name=f"router-{i}", node=i + 1)) for i in (0, 1)
    ]
    control = (process("orchestrator", name="orchestrator", health=False),)
    replicas = (replica(0, "engine-r0-0"), replica(1, "engine-r1-0"))
    return Agents(control, *nodes, replicas=replicas, **options)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    agents = two_replicas(spares=1)
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(91.0) is None
    assert fleet.assignment.rank_of == {0: 0, 1: 3, 2: 2} and fleet.assignment.generation == 2
    assert not fleet.assembled and fleet.report("engine-r0-0") is None
    assert agents.decide(92.0) is None
    assert fleet.assembled and fleet.lost == set()
    # it comes back, and is not used again
    agents.silent = set()
    assert agents.decide(93.0) is None
    assert fleet.assignment.node_of(1) is None
    agents.silent = {3}
    assert agents.decide(190.0) is None
    assert fleet.lost == {"engine-r0-0", "router-0"}


def test_a_replica_among_several_is_given_up_and_the_last_one_is_not() -> None:
    agents = two_replicas()
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) is None
    assert fleet.lost == {"engine-r1-0", "router-1"}
    assert agents.news(ProcessesGivenUp)[0].processes == ["engine-r1-0", "router-1"]
    agents.silent = {1, 2}
    assert agents.decide(200.0) == Ending(Outcome.FAILED, "node n1: has been silent for 109 s", "n1")


def test_one_engine_of_a_replica_may_be_lost() -> None:
    """Of prefill and decode engines, each kind must be left for the replica to serve."""
    prefill = [process("prefill", name=f"prefill-r0-{i}", node=i) for i in (0, 1)]
    decode, router = process("decode", name="decode-r0-0"), process("router", name="router-0")
    r = replica(0, "prefill-r0-0", "prefill-r0-1", "decode-r0-0")
    agents = Agents((prefill[0], decode, router), (prefill[1],), replicas=(r,))
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(91.0) is None
    assert fleet.lost == {"prefill-r0-1"}
    agents.states = {"prefill-r0-0": ProcessReport(state="failed", exit_code=3, restarts=5)}
    ending = agents.decide(92.0)
    assert ending == Ending(Outcome.FAILED, "prefill-r0-0 ended with exit code 3 after 5 restarts", "prefill-r0-0")


def test_what_has_no_spare_ends_with_its_node() -> None:
    orchestrator = process("orchestrator", name="orchestrator", health=False, node=1)
    agents = Agents((process(name="a"),), (orchestrator,), spares=1)
    agents.assigned()
    agents.silent = {1}
    assert agents.decide(91.0) == Ending(Outcome.FAILED, "node n1: has been silent for 91 s", "n1")


def trainer_of_two(spares: int) -> Agents:
    """A trainer with a rank on each of nodes 1 and 2."""
    ranks = [process("trainer", "attempt", f"t{i}", health=False, node=i + 1) for i in (0, 1)]
    members = [(rank.model_copy(update={"unit": "trainer"}),) for rank in ranks]
    agents = Agents((process("orchestrator", name="orchestrator"),), *members, spares=spares)
    agents.assigned()
    return agents


DIED = ProcessReport(state="failed", exit_code=1)


def test_a_trainer_whose_node_is_lost_moves_to_a_spare_as_one() -> None:
    agents = trainer_of_two(spares=1)
    agents.silent = {2}
    agents.states = {"t0": DIED}  # it has noticed the loss long before the head does
    for now in (5.0, 30.0, 90.0):
        assert agents.decide(now) is None and not agents.fleet.orders
    assert agents.decide(91.0) is None
    assert agents.fleet.orders == {"trainer": RestartOrder(1, hold=True)}
    agents.states["t1"] = ProcessReport(state="waiting")  # on the spare
    assert agents.decide(91.0 + BACKOFF_S[0]) is None
    assert agents.fleet.assignment.rank_of[2] == 3
    assert agents.fleet.orders == {"trainer": RestartOrder(1, hold=False)}
    agents.states = {"t0": fallen(1, "ready"), "t1": fallen(1, "ready")}
    assert agents.decide(95.0) is None
    agents.states["t0"] = msgspec.structs.replace(DIED, generation=1)
    assert agents.decide(96.0) == Ending(Outcome.FAILED, "t0 ended with exit code 1", "t0")


@pytest.mark.parametrize("spares", [0, 1])
def test_a_trainer_rank_that_dies_by_itself_ends_the_attempt(spares: int) -> None:
    """At once without a spare; with one, when the other nodes have been heard of since."""
    agents = trainer_of_two(spares)
    agents.states = {"t0": DIED}
    expected = Ending(Outcome.FAILED, "t0 ended with exit code 1", "t0")
    assert agents.decide(10.0) == (None if spares else expected)
    assert agents.decide(10.0 + VERDICT_S) == (None if spares else expected)
    assert agents.decide(11.0 + VERDICT_S) == expected


def test_a_trainer_rank_whose_gpu_failed_moves_to_a_spare() -> None:
    agents = trainer_of_two(spares=1)
    agents.states = {"t1": DIED}
    assert agents.decide(10.0) is None
    agents.unfit = {2: "GPU 3 has 2 uncorrected ECC errors"}
    assert agents.decide(12.0) is None
    assert agents.fleet.assignment.rank_of[2] == 3 and agents.fleet.orders == {"trainer": RestartOrder(1, hold=True)}


def test_a_trainer_node_without_a_spare_ends_the_attempt() -> None:
    agents = trainer_of_two(spares=0)
    agents.silent = {2}
    assert agents.decide(91.0) == Ending(Outcome.FAILED, "node n2: has been silent for 91 s", "n2")


@pytest.mark.parametrize("spares", [0, 1])
def test_a_teacher_moves_to_a_spare_and_is_never_done_without(spares: int) -> None:
    serving = (process("router", name="router-0"), process(name="engine-r0-0"))
    teachers = [(process("teacher", name=f"teacher-{i}", node=i + 1),) for i in (0, 1)]
    agents = Agents(serving, *teachers, spares=spares, replicas=(replica(0, "engine-r0-0"),))
    fleet = agents.assigned()
    agents.silent = {2}
    ending = agents.decide(91.0)
    if spares:
        assert ending is None and fleet.assignment.rank_of == {0: 0, 1: 1, 2: 3} and not fleet.lost
    else:
        assert ending == Ending(Outcome.FAILED, "node n2: has been silent for 91 s", "n2")


def unit_of_two(**options: int) -> Agents:
    """A restart group over nodes 1 and 2, and another replica on the head's node."""
    members = [(process(name=f"engine-r0-{i}", node=i + 1, unit="r0"),) for i in (0, 1)]
    first = (process("router", name="router-0"), process("router", name="router-1"), process(name="engine-r1-0"))
    replicas = (replica(0, "engine-r0-0", "engine-r0-1"), replica(1, "engine-r1-0"))
    return Agents(first, *members, replicas=replicas, **options)


def fallen(generation: int, state: str = "fallen") -> ProcessReport:
    return ProcessReport(state=state, exit_code=-9, generation=generation)


def test_a_restart_group_restarts_as_one_and_only_when_all_of_it_has_ended() -> None:
    agents = unit_of_two()
    fleet = agents.assigned()
    agents.states = {"engine-r0-1": fallen(0)}
    assert agents.decide(10.0) is None
    assert fleet.orders == {"r0": RestartOrder(1, hold=True)}
    agents.decide(10.0 + BACKOFF_S[0])
    assert fleet.orders["r0"].hold, "its other member still runs"
    agents.states["engine-r0-0"] = fallen(0, "waiting")
    agents.decide(12.0)
    assert fleet.orders == {"r0": RestartOrder(1, hold=False)}
    agents.states = {name: fallen(1, "ready") for name in agents.states}
    agents.decide(13.0)
    assert fleet.orders == {"r0": RestartOrder(1, hold=False)}
    assert [news.generation for news in agents.news(ProcessesRestarted)] == [1]


def test_a_turn_of_the_head_takes_as_long_as_there_are_nodes_and_not_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    agent_of = Fleet.agent_of
    monkeypatch.setattr(Fleet, "agent_of", lambda self, node: looks.append(node) or agent_of(self, node))

    def looks_at(nodes: int) -> int:
        agents = Agents(*((process(name=f"engine-r{i}-0", node=i, unit=f"r{i}"),) for i in range(nodes)))
        agents.assigned()
        agents.decide(1.0)  # the first turn also finds that the role serves
        looks.clear()
        agents.decide(2.0)
        return len(looks)

    assert looks_at(80) <= 2 * looks_at(40)


def test_a_restart_group_that_keeps_dying_is_given_up_as_one() -> None:
    agents = unit_of_two()
    fleet = agents.assigned()
    for generation in range(3):
        agents.states = {"engine-r0-0": fallen(generation), "engine-r0-1": fallen(generation, "waiting")}
        assert agents.decide(10.0 + generation) is None
    assert fleet.restart_groups["r0"].generation == 2
    assert fleet.lost == {"engine-r0-0", "engine-r0-1", "router-0"}


def test_a_restart_group_moves_to_a_spare_as_one() -> None:
    agents = unit_of_two(spares=1)
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) is None
    assert fleet.orders == {"r0": RestartOrder(1, hold=True)}
    agents.states = {"engine-r0-0": fallen(0, "waiting"), "engine-r0-1": fallen(0, "waiting")}
    agents.decide(95.0)
    assert fleet.assignment.rank_of[2] == 3 and fleet.orders == {"r0": RestartOrder(1, hold=False)}


def test_a_restart_group_without_one_of_its_nodes_is_lost_as_one() -> None:
    agents = unit_of_two()
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) is None
    assert fleet.lost == {"engine-r0-0", "engine-r0-1", "router-0"}


def test_an_agents_own_error_ends_the_attempt() -> None:
    agents = Agents((process(),))
    agents.assigned()
    fleet = agents.fleet
    fleet.observe(msgspec.structs.replace(fleet.agents[0], error="NetworkError: no free port"), now=0.0)
    assert fleet.decide(1.0) == Ending(Outcome.FAILED, "node n0: NetworkError: no free port", "n0")


def test_completion_needs_trainer_and_orchestrator() -> None:
    agents = Agents((process("orchestrator", name="orchestrator"), process("trainer", "attempt", "t")))
    agents.assigned()
    agents.states = {"t": DONE}
    assert agents.decide(1.0) is None
    agents.states = {"t": DONE, "orchestrator": DONE}
    assert agents.decide(1.0) == Ending(Outcome.COMPLETED, "all steps done")


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        (exit_codes.CHECKPOINTED, Outcome.PREEMPTED, "p checkpointed and stopped"),
        (exit_codes.STALLED, Outcome.FAILED, "p saw no progress: see its events"),
        (-9, Outcome.FAILED, "p was ended by signal 9"),
        (1, Outcome.FAILED, "p ended with exit code 1"),
    ],
)
def test_failed_processes_end_the_attempt(code: int, outcome: Outcome, reason: str) -> None:
    agents = Agents((process(),))
    agents.assigned()
    agents.states = {"p": ProcessReport(state="failed", exit_code=code)}
    assert agents.decide(0.0) == Ending(outcome, reason, "p")


def test_environments_that_load_nowhere_are_no_nodes_fault() -> None:
    agents = Agents((process("environment"),), (process("environment", name="f", node=1),), spares=1)
    why = "environments.0.id = x: no such environment"
    agents.environments, agents.checking = {0: why, 1: why}, {2}
    assert agents.decide(1.0) is None, "one has not tried yet"
    agents.environments[2], agents.checking = why, set()
    ending = agents.decide(2.0)
    assert ending is not None and ending.final and ending.suspect == "environments"
    assert ending.reason == f"environments do not load on node n0: {why}"
    assert not agents.news(NodeLost)


def test_environments_that_load_on_other_nodes_are_their_nodes_fault() -> None:
    agents = Agents((process(),), (process("environment", name="f", node=1),), spares=1)
    agents.environments = {1: "there is no program apptainer"}
    agents.assigned()
    assert [item.blamed for item in agents.fleet.news if isinstance(item.event, NodeLost)] == ["n1"]
    assert agents.fleet.assignment.node_of(2) == 1


@pytest.mark.parametrize(
    ("code", "words", "own", "reason", "final"),
    [
        (exit_codes.UNRECOVERABLE, "environment x fails every time: E", "E", "environment x fails every time: E", True),
        (exit_codes.UNRECOVERABLE, "", "", "p ended with exit code 77: see its events", True),
        (
            exit_codes.UNRECOVERABLE,
            "",
            "FloatingPointError: nan",
            "p ended with exit code 77 (FloatingPointError: nan)",
            True,
        ),
        (exit_codes.STALLED, "no finished rollout for 100 s", "", "no finished rollout for 100 s", False),
    ],
)
def test_last_words_are_the_reason(code: int, words: str, own: str, reason: str, final: bool) -> None:
    agents = Agents((process(restart="attempt"),))
    fleet = agents.assigned()
    agents.states["p"] = ProcessReport(state="failed", exit_code=code, reason=own)
    fleet.last_words = words
    ending = agents.decide(1.0)
    assert ending is not None and (ending.reason, ending.final) == (reason, final)


def test_no_progress_is_a_stall() -> None:
    agents = Agents((process(),))
    fleet = agents.assigned()
    fleet.observe_progress((1, 1), now=10.0)
    assert agents.decide(150.0) is None
    ending = agents.decide(161.0)
    assert ending is not None and ending.reason == "no progress for 2 min 31 s"
    fleet.observe_progress((1, 2), now=161.0)
    assert agents.decide(162.0) is None


FAILED, PREEMPTED = Ending(Outcome.FAILED, "x"), Ending(Outcome.PREEMPTED, "x")


@pytest.mark.parametrize(
    ("ending", "attempt", "fruitless", "expected"),
    [
        (Ending(Outcome.COMPLETED, ""), 1, 0, (False, "")),
        (Ending(Outcome.CANCELLED, ""), 1, 0, (False, "")),
        (FAILED, 1, 1, (True, "")),
        (FAILED, 3, 2, (True, "")),
        (FAILED, 4, 3, (False, "three failed attempts in a row committed nothing new")),
        (PREEMPTED, 4, 3, (True, "")),
        (PREEMPTED, 9, 0, (False, "this was attempt 9 of 9")),
        (Ending(Outcome.FAILED, "full", "shared file system"), 5, 3, (True, "")),
        (Ending(Outcome.FAILED, "x", final=True), 1, 1, (False, "another attempt would end in the same way")),
    ],
)
def test_requeue_rules(ending: Ending, attempt: int, fruitless: int, expected: tuple[bool, str]) -> None:
    plan: Plan = plan_of(Path("/runs/x"), (process(),), max_attempts=9)
    assert should_requeue(ending, attempt, plan, fruitless, again=False) == expected


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ([("preempted", None)], 0),
        ([("preempted", 3)], 1),
        ([("preempted", 3), ("preempted", 3)], 1),
        ([("preempted", 3), ("failed", 5), ("preempted", 8)], 2),
        ([("failed", 3), ("failed", 5)], 0),
    ],
)
def test_attempts_that_slurm_ended_are_free_if_they_committed_a_step(
    ends: list[tuple[str, int | None]], count: int
) -> None:
    assert fruitful_preemptions(ends) == count


def test_free_attempts_do_not_count_towards_max_attempts() -> None:
    plan: Plan = plan_of(Path("/runs/x"), (process(),), max_attempts=9)
    assert should_requeue(PREEMPTED, 40, plan, 0, again=False, free=32) == (True, "")
    why = "this was attempt 9 of 9, not counting 31 that Slurm ended after they committed a step"
    assert should_requeue(PREEMPTED, 40, plan, 0, again=False, free=31) == (False, why)


def test_a_job_that_must_not_be_requeued_is_not() -> None:
    plan: Plan = plan_of(Path("/runs/x"), (process(),), max_attempts=9)
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"requeue": False})})
    assert should_requeue(PREEMPTED, 1, plan, 0, again=False, free=1) == (False, "slurm.requeue is false")


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ([(True, None)], 1),
        ([(True, None), (True, None), (True, None)], 3),
        ([(True, 5)], 0),
        ([(True, 5), (True, 5), (True, 5)], 2),  # the first of them has committed step 5
        ([(False, 5), (True, 5), (True, 5), (True, 5)], 3),
        ([(True, 5), (True, 5), (False, 5), (True, 5)], 2),  # a preemption, or a full disk
        ([(True, 5), (True, 5), (False, 6), (True, 6)], 1),
        ([(True, 5), (True, 5), (True, 7)], 0),
    ],
)
def test_failed_attempts_that_committed_nothing_new(ends: list[tuple[bool, int | None]], count: int) -> None:
    assert fruitless(ends) == count


def test_placeholders() -> None:
    addresses = Addresses({"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": {"http": 1}, "b": {"http": 2}})
    text = "${host} ${port:http} ${host:b} ${port:b:http} ${addr:b:http} ${tmp} {json} $HOME"
    assert resolve(text, "a", addresses, {"tmp": "/t"}) == "10.0.0.1 1 10.0.0.2 2 10.0.0.2:2 /t {json} $HOME"


@pytest.mark.parametrize("text", ["${host:c}", "${port:ssh}", "${addr:b:ssh}", "${nothing}"])
def test_unknown_placeholders_are_errors(text: str) -> None:
    addresses = Addresses({"a": "x", "b": "y"}, {"a": {}, "b": {}})
    with pytest.raises(UnknownPlaceholder):
        resolve(text, "a", addresses, {})


@pytest.mark.parametrize(("node", "goes_on"), [(2, True), (1, False)])
def test_a_store_s_master_is_needed_and_its_clients_are_not(node: int, goes_on: bool) -> None:
    """Each inference node has a client of the key-value store. Plans once had the master of all on the first one."""
    client = [process("store", name=f"store-{i}", node=i) for i in (1, 2)]
    client = [made.model_copy(update={"after": ("store-master",)}) for made in client]
    nodes = [
        (client[i], process(name=f"engine-r{i}-0", node=i + 1), process("router", name=f"router-{i}", node=i + 1))
        for i in (0, 1)
    ]
    master = process("store", name="store-master", node=1)
    replicas = (replica(0, "engine-r0-0"), replica(1, "engine-r1-0"))
    agents = Agents(
        (process(name="x", role="orchestrator", health=False),), (master, *nodes[0]), nodes[1], replicas=replicas
    )
    agents.assigned()
    agents.silent = {node}
    assert (agents.decide(91.0) is None) is goes_on


def test_any_inference_node_can_be_lost_where_another_replica_shares_its_store() -> None:
    recipe = Path(__file__).parents[2] / "emulated" / "small.yaml"
    offload = "inference.kv_offload={type: mooncake, cpu: {bytes: 1073741824}}"
    plan = load(recipe, emulate=True, overrides=[offload, "deployment.spares.decode=0"]).plan()
    for node in (node.index for node in plan.nodes if node.role in ("prefill", "decode")):
        agents = Agents((process(),))
        agents.fleet = Fleet(plan, started_at=0.0)
        agents.silent = {agents.assigned().assignment.rank_of[node]}
        assert agents.decide(plan.node_silent_s + 1.0) is None
        assert agents.fleet.lost


def environment_worker() -> Supervision:
    return Supervision(process("environment", health=False))


@pytest.mark.parametrize(
    "code", [139, -11, -9, 0, 1, exit_codes.UNRECOVERABLE, exit_codes.STALLED, exit_codes.CHECKPOINTED]
)
def test_a_worker_that_its_tasks_kill_is_restarted_without_limit(code: int) -> None:
    """The orchestrator finds out which task does. The wait stays short, or one bad task would cost minutes."""
    s, now = environment_worker(), 0.0
    for _ in range(50):
        assert s.tick(now, prerequisites=True, ready=False) == "start"
        s.started(now)
        s.tick(now, prerequisites=True, ready=True)
        s.exited(now, code, ending=False, served=True)
        assert s.state is ProcessState.BACKOFF
        now += BACKOFF_S[0]


def test_a_worker_that_never_serves_is_given_up() -> None:
    s, now, starts = environment_worker(), 0.0, 0
    while s.tick(now, prerequisites=True, ready=False) == "start":
        s.started(now)
        starts += 1
        s.exited(now, -11, ending=False, served=starts == 2)
        now += 100
    assert s.state is ProcessState.FAILED and starts == 2 + 1 + s.process.max_restarts


def test_a_worker_that_ends_with_the_attempt_is_stopped() -> None:
    s = environment_worker()
    s.started(0.0)
    s.exited(1.0, 0, ending=True, served=True)
    assert s.state is ProcessState.STOPPED


def test_time_in_which_a_process_hangs_earns_no_fresh_count() -> None:
    s, now = Supervision(process()), 0.0
    for _ in range(s.process.max_restarts + 1):
        assert s.tick(now, prerequisites=True, ready=False) == "start"
        s.started(now)
        s.tick(now, prerequisites=True, ready=True)
        for silent in range(0, 400, 10):  # it hangs from its start on
            s.tick(now + silent, prerequisites=True, ready=True, silent_s=silent)
        s.exited(now + 400, -9, ending=False)
        now += 500
    assert s.state is ProcessState.FAILED
