"""The head's state machine: node assignment, losses, restart groups and endings. The clock is an argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from primeslurm.api.recipes.loading import load
from primeslurm.node.agent.supervision import BACKOFF_S
from primeslurm.node.attempt.attempt_end import count_fruitless_attempts, fruitful_preemptions, should_requeue
from primeslurm.node.head.fleet import RANKS_END_S, SPARE_WAIT_S, VERDICT_S, Fleet
from primeslurm.plan.model import Plan, Replica
from primeslurm.records.events.nodes import NodeLost, ProcessesGivenUp, ProcessesRestarted
from primeslurm.records.fleet import Ending, Outcome, ProcessReport, RestartOrder
from primeslurm.wire import exit_codes
from tests.support.plans import plan_of
from tests.unit.node.fleet_of_agents import Agents, process

DONE = ProcessReport("done", exit_code=0)
DIED = ProcessReport("failed", exit_code=1)


def two_nodes(**options: int) -> Agents:
    agents = Agents((process(name="a"),), (process(name="b", node=1),), **options)
    agents.fleet.hosts = ("n0", "n1", "n2")
    return agents


def replica(index: int, *engines: str) -> Replica:
    return Replica(index=index, router=f"router-{index}", engines=engines, nodes=())


def two_replicas(**options: int) -> Agents:
    """Return the orchestrator, and two nodes with an engine and its router each."""
    nodes = [
        (process(name=f"engine-r{i}-0", node=i + 1), process("router", name=f"router-{i}", node=i + 1)) for i in (0, 1)
    ]
    control = (process("orchestrator", name="orchestrator", health=False),)
    return Agents(control, *nodes, replicas=(replica(0, "engine-r0-0"), replica(1, "engine-r1-0")), **options)


def trainer_of_two(spares: int) -> Agents:
    """Return a trainer with a rank on each of nodes 1 and 2."""
    ranks = [process("trainer", "attempt", f"t{i}", health=False, node=i + 1) for i in (0, 1)]
    members = [(rank.model_copy(update={"restart_group": "trainer"}),) for rank in ranks]
    agents = Agents((process("orchestrator", name="orchestrator"),), *members, spares=spares)
    agents.assigned()
    return agents


def group_of_two(**options: int) -> Agents:
    """Return a restart group over nodes 1 and 2, and another replica on the head's node."""
    members = [(process(name=f"engine-r0-{i}", node=i + 1, unit="r0"),) for i in (0, 1)]
    first = (process("router", name="router-0"), process("router", name="router-1"), process(name="engine-r1-0"))
    replicas = (replica(0, "engine-r0-0", "engine-r0-1"), replica(1, "engine-r1-0"))
    return Agents(first, *members, replicas=replicas, **options)


def killed(generation: int, state: str = "fallen") -> ProcessReport:
    return ProcessReport(state, exit_code=-9, generation=generation)


def silent_for(seconds: int, node: str) -> Ending:
    return Ending(Outcome.FAILED, f"node {node}: has been silent for {seconds} s", node)


# assignment


def test_nodes_go_to_fit_agents_in_order_and_the_rest_are_spares() -> None:
    agents = two_nodes(spares=1)
    agents.unfit = {1: "GPU 3 has 2 uncorrected ECC errors"}
    assert agents.assigned().assignment.rank_of == {0: 0, 1: 2}
    assert agents.news(NodeLost) == [NodeLost("n1", 1, "GPU 3 has 2 uncorrected ECC errors")]
    assert agents.blamed == ["n1"] and agents.fleet.decide(1.0) is None


@pytest.mark.parametrize(("spares", "rank"), [(0, 1), (1, 0)], ids=["no spare", "the head's own node"])
def test_an_unfit_node_that_cannot_be_replaced_ends_the_attempt(spares: int, rank: int) -> None:
    agents = two_nodes(spares=spares)
    agents.unfit = {rank: "no space"}
    assert agents.decide(1.0) == Ending(Outcome.FAILED, f"node n{rank}: no space", f"n{rank}")


def test_nodes_with_the_same_address_end_the_run_without_blame() -> None:
    agents = two_nodes()
    agents.fleet.plan = agents.fleet.plan.model_copy(update={"executor": "slurm"})
    agents.report(0.0)
    for report in agents.fleet.agents.copy().values():
        agents.fleet.observe(msgspec.structs.replace(report, address="172.17.0.1"), 0.0)
    ending = agents.fleet.decide(0.0)
    assert ending is not None and (ending.outcome, ending.suspect, ending.final) == ("failed", "network", True)
    assert "nodes n0 and n1 both have the address 172.17.0.1" in ending.reason and agents.news(NodeLost) == []


def test_a_late_spare_is_not_waited_for_and_becomes_a_bad_node() -> None:
    agents = Agents((process(name="a"),), spares=1)
    agents.fleet.hosts = ("n0", "n1")
    agents.silent = {1}
    assert agents.decide(1.0) is None and not agents.fleet.assignment.generation
    assert agents.decide(2.0 + SPARE_WAIT_S) is None and agents.fleet.assignment.rank_of == {0: 0}
    assert agents.decide(301.0) is None and agents.blamed == ["n1"]


@pytest.mark.parametrize(
    ("how", "why"), [("silent", "no sign of its agent"), ("checking", "its preflight has not ended")]
)
def test_a_node_that_is_not_ready_in_time_ends_the_attempt(how: str, why: str) -> None:
    agents = two_nodes(node_start_s=1000)
    setattr(agents, how, {1})
    assert agents.decide(1000.0) is None
    assert agents.decide(1001.0) == Ending(Outcome.FAILED, f"node n1: {why} within 16 min 40 s", "n1")


def test_an_agent_that_is_killed_in_preflight_is_lost_at_once() -> None:
    agents = two_nodes()
    agents.checking = {1}
    assert agents.decide(1.0) is None
    agents.silent = {1}
    agents.fleet.observe_kills({"n1": "Segmentation fault"})
    assert agents.decide(2.0) == Ending(Outcome.FAILED, "node n1: its agent was killed: Segmentation fault", "n1")


@pytest.mark.parametrize("spare_works", [True, False])
def test_an_agent_that_is_killed_before_its_first_heartbeat_is_lost_at_once(spare_works: bool) -> None:
    agents = two_nodes(spares=1)
    agents.fleet.hosts = ["n0", "n1", "n2"]
    agents.silent = {1} if spare_works else {0, 1, 2}
    assert agents.decide(1.0) is None and not agents.fleet.assignment.generation
    agents.fleet.observe_kills({"n1": "Killed"})
    ending = agents.decide(2.0)
    assert ending is None and agents.news(NodeLost) == [NodeLost("n1", 1, "its agent was killed: Killed")]
    assert (agents.fleet.assignment.rank_of, agents.blamed) == (({0: 0, 1: 2}, ["n1"]) if spare_works else ({}, []))


def test_an_agent_that_cannot_be_started_is_lost_at_once() -> None:
    agents = two_nodes(spares=1)
    agents.silent = {1}
    assert agents.decide(0.0) is None and not agents.fleet.assignment.generation
    codes = {"n1": "Exited with exit code 127", "n2": "Exited with exit code 1"}  # n2 has sent a heartbeat
    for now in (1.0, 2.0):
        agents.fleet.observe_exits(codes, now)
    assert agents.decide(2.0) is None and agents.fleet.assignment.rank_of == {0: 0, 1: 2}
    assert agents.news(NodeLost) == [NodeLost("n1", 1, "no agent could be started: Exited with exit code 127")]
    assert agents.blamed == ["n1"]


def test_a_reason_names_four_of_hundreds_of_lost_nodes() -> None:
    agents = Agents(*((process(name=f"p{node}", node=node),) for node in range(300)))
    agents.fleet.hosts = [f"n{node}" for node in range(300)]
    agents.silent = set(range(1, 300))
    agents.decide(0.0)
    agents.fleet.observe_exits({f"n{node}": "Job credential expired" for node in range(1, 300)}, 1.0)
    ending = agents.decide(1.0)
    assert ending is not None and ending.reason.count("Job credential expired") == 4
    assert ending.reason.endswith("; and 295 nodes more") and len(agents.news(NodeLost)) == 299


# losses


def test_a_node_whose_agent_was_killed_is_replaced_at_once() -> None:
    agents = two_nodes(spares=1)
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(1.0) is None and fleet.gone == {}
    fleet.observe_kills({"n1": "Killed"})
    assert agents.decide(1.5) is None
    assert fleet.gone == {1: "node n1: its agent was killed: Killed"} and fleet.assignment.rank_of == {0: 0, 1: 2}


def with_orchestrator(spares: int) -> Agents:
    return Agents((process(name="a"),), (process("orchestrator", name="o", health=False, node=1),), spares=spares)


@pytest.mark.parametrize(
    ("make", "spares", "rank"),
    [
        pytest.param(two_nodes, 0, 1, id="no spare"),
        pytest.param(with_orchestrator, 1, 1, id="the node of the orchestrator"),
        pytest.param(trainer_of_two, 0, 2, id="a trainer's, without a spare"),
    ],
)
def test_a_silent_node_that_cannot_be_replaced_ends_the_attempt(
    make: Callable[..., Agents], spares: int, rank: int
) -> None:
    agents = make(spares=spares)
    fleet = agents.assigned()
    agents.silent = {rank}
    assert agents.decide(90.0) is None
    assert agents.decide(91.0) == silent_for(91, f"n{rank}")
    assert fleet.gone == {rank: f"node n{rank}: has been silent for 91 s"}


def test_a_spare_replaces_a_lost_node_which_is_not_used_again() -> None:
    agents = two_replicas(spares=1)
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(91.0) is None
    assert fleet.assignment.rank_of == {0: 0, 1: 3, 2: 2} and fleet.assignment.generation == 2
    assert not fleet.assembled and fleet.report("engine-r0-0") is None
    assert agents.decide(92.0) is None and fleet.assembled and fleet.lost == set()
    agents.silent = set()
    assert agents.decide(93.0) is None and fleet.assignment.node_of(1) is None
    agents.silent = {3}
    assert agents.decide(190.0) is None and fleet.lost == {"engine-r0-0", "router-0"}


def test_replicas_are_given_up_except_the_last_one() -> None:
    agents = two_replicas()
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) is None and fleet.lost == {"engine-r1-0", "router-1"}
    assert agents.news(ProcessesGivenUp)[0].processes == ["engine-r1-0", "router-1"]
    agents.silent = {1, 2}
    assert agents.decide(200.0) == silent_for(109, "n1")


def test_a_replica_needs_one_prefill_and_one_decode_engine() -> None:
    prefill = [process("prefill", name=f"prefill-r0-{i}", node=i) for i in (0, 1)]
    decode, router = process("decode", name="decode-r0-0"), process("router", name="router-0")
    r = replica(0, "prefill-r0-0", "prefill-r0-1", "decode-r0-0")
    agents = Agents((prefill[0], decode, router), (prefill[1],), replicas=(r,))
    fleet = agents.assigned()
    agents.silent = {1}
    assert agents.decide(91.0) is None and fleet.lost == {"prefill-r0-1"}
    agents.states = {"prefill-r0-0": ProcessReport("failed", exit_code=3, restarts=5)}
    reason = "prefill-r0-0 ended with exit code 3 after 5 restarts"
    assert agents.decide(92.0) == Ending(Outcome.FAILED, reason, "prefill-r0-0")


@pytest.mark.parametrize("spares", [0, 1])
def test_a_teacher_moves_to_a_spare_and_is_never_given_up(spares: int) -> None:
    serving = (process("router", name="router-0"), process(name="engine-r0-0"))
    teachers = [(process("teacher", name=f"teacher-{i}", node=i + 1),) for i in (0, 1)]
    agents = Agents(serving, *teachers, spares=spares, replicas=(replica(0, "engine-r0-0"),))
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) == (None if spares else silent_for(91, "n2"))
    assert not spares or (fleet.assignment.rank_of == {0: 0, 1: 1, 2: 3} and not fleet.lost)


@pytest.mark.parametrize(("node", "survives"), [(2, True), (1, False)])
def test_the_master_of_a_kv_store_is_needed_and_its_clients_are_not(node: int, survives: bool) -> None:
    clients = [process("store", name=f"store-{i}", node=i) for i in (1, 2)]
    clients = [client.model_copy(update={"after": ("store-master",)}) for client in clients]
    nodes = [
        (clients[i], process(name=f"engine-r{i}-0", node=i + 1), process("router", name=f"router-{i}", node=i + 1))
        for i in (0, 1)
    ]
    master, control = process("store", name="store-master", node=1), process("orchestrator", name="x", health=False)
    replicas = (replica(0, "engine-r0-0"), replica(1, "engine-r1-0"))
    agents = Agents((control,), (master, *nodes[0]), nodes[1], replicas=replicas)
    agents.assigned()
    agents.silent = {node}
    assert (agents.decide(91.0) is None) is survives


def test_any_inference_node_can_be_lost_if_another_replica_shares_its_store() -> None:
    recipe = Path(__file__).parents[2] / "emulated" / "small.yaml"
    offload = "inference.kv_offload={type: mooncake, cpu: {bytes: 1073741824}}"
    plan = load(recipe, emulate=True, overrides=[offload, "deployment.spares.decode=0"]).plan()
    for node in (node.index for node in plan.nodes if node.role in ("prefill", "decode")):
        agents = Agents((process(),))
        agents.fleet = Fleet(plan, started_at=0.0)
        agents.silent = {agents.assigned().assignment.rank_of[node]}
        assert agents.decide(plan.node_silent_s + 1.0) is None
        assert agents.fleet.lost


def test_environments_that_load_nowhere_end_the_run_without_blame() -> None:
    agents = Agents((process("environment"),), (process("environment", name="f", node=1),), spares=1)
    why = "environments.0.id = x: no such environment"
    agents.environments, agents.checking = {0: why, 1: why}, {2}
    assert agents.decide(1.0) is None, "one node has not loaded them yet"
    agents.environments[2], agents.checking = why, set()
    ending = agents.decide(2.0)
    assert ending is not None and ending.final and ending.suspect == "environments"
    assert ending.reason == f"environments do not load on node n0: {why}" and not agents.news(NodeLost)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_environments_may_turn_out_not_to_load_after_the_assignment(elsewhere: bool) -> None:
    agents = Agents((process(),), (process("environment", name="f", node=1),), spares=1)
    agents.loading, why = {0, 1, 2}, "there is no program apptainer"
    assert agents.assigned().assignment.node_of(1) == 1, "engines do not wait for environments"
    agents.loading, agents.environments = {0, 2}, {1: why}
    assert agents.decide(1.0) is None and not agents.blamed, "the node may not be the only one"
    agents.loading = set()
    if elsewhere:
        assert agents.decide(2.0) is None
        assert agents.fleet.assignment.node_of(2) == 1 and agents.blamed == ["n1"]
    else:
        agents.environments |= {0: why, 2: why}
        ending = agents.decide(2.0)
        assert ending is not None and ending.final and ending.suspect == "environments" and not agents.blamed


def test_a_node_is_blamed_for_environments_that_load_elsewhere() -> None:
    agents = Agents((process(),), (process("environment", name="f", node=1),), spares=1)
    agents.environments = {1: "there is no program apptainer"}
    assert agents.assigned().assignment.node_of(2) == 1 and agents.blamed == ["n1"]


# restart groups and trainers


def test_a_restart_group_restarts_once_all_members_have_ended() -> None:
    agents = group_of_two()
    fleet = agents.assigned()
    agents.states = {"engine-r0-1": killed(0)}
    assert agents.decide(10.0) is None and fleet.orders == {"r0": RestartOrder(1, hold=True)}
    agents.decide(10.0 + BACKOFF_S[0])
    assert fleet.orders["r0"].hold, "its other member still runs"
    agents.states["engine-r0-0"] = killed(0, "waiting")
    agents.decide(12.0)
    assert fleet.orders == {"r0": RestartOrder(1, hold=False)}
    agents.states = {name: killed(1, "ready") for name in agents.states}
    agents.decide(13.0)
    assert fleet.orders == {"r0": RestartOrder(1, hold=False)}
    assert [news.generation for news in agents.news(ProcessesRestarted)] == [1]


def test_a_restart_group_that_keeps_dying_is_given_up_as_one() -> None:
    agents = group_of_two()
    fleet = agents.assigned()
    for generation in range(3):
        agents.states = {"engine-r0-0": killed(generation), "engine-r0-1": killed(generation, "waiting")}
        assert agents.decide(10.0 + generation) is None
    assert fleet.restart_groups["r0"].generation == 2
    assert fleet.lost == {"engine-r0-0", "engine-r0-1", "router-0"}


def test_only_time_in_which_all_members_are_ready_renews_the_restart_budget_of_their_group() -> None:
    agents = group_of_two()
    group = agents.assigned().restart_groups["r0"]

    def fell(at: float) -> None:
        agents.states = {name: killed(group.generation, "fallen") for name in ("engine-r0-0", "engine-r0-1")}
        assert agents.decide(at) is None
        agents.decide(at + 5.0)

    def are(at: float, *states: str) -> None:
        agents.states = {f"engine-r0-{i}": killed(group.generation, state) for i, state in enumerate(states)}
        agents.decide(at)

    fell(10.0)
    are(20.0, "loading", "ready")
    are(1000.0, "ready", "ready")
    fell(1001.0)
    assert group.restarts == 2, "one of them was loading until just before"
    are(1010.0, "ready", "ready")
    are(1320.0, "ready", "ready")
    assert group.restarts == 0
    fell(1330.0)
    assert group.generation == 3


@pytest.mark.parametrize("spares", [0, 1])
def test_a_restart_group_whose_node_is_lost_moves_to_a_spare_or_is_given_up_as_one(spares: int) -> None:
    agents = group_of_two(spares=spares)
    fleet = agents.assigned()
    agents.silent = {2}
    assert agents.decide(91.0) is None
    if not spares:
        assert fleet.lost == {"engine-r0-0", "engine-r0-1", "router-0"}
        return
    assert fleet.orders == {"r0": RestartOrder(1, hold=True)}
    agents.states = {"engine-r0-0": killed(0, "waiting"), "engine-r0-1": killed(0, "waiting")}
    agents.decide(95.0)
    assert fleet.assignment.rank_of[2] == 3 and fleet.orders == {"r0": RestartOrder(1, hold=False)}


def test_work_of_a_tick_grows_linearly_with_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    agent_of = Fleet.agent_of
    monkeypatch.setattr(Fleet, "agent_of", lambda self, node: looks.append(node) or agent_of(self, node))

    def looks_at(nodes: int) -> int:
        agents = Agents(*((process(name=f"engine-r{i}-0", node=i, unit=f"r{i}"),) for i in range(nodes)))
        agents.assigned()
        agents.decide(1.0)  # the first tick also finds that the role serves
        looks.clear()
        agents.decide(2.0)
        return len(looks)

    assert looks_at(80) <= 2 * looks_at(40)


def test_a_trainer_whose_node_is_lost_moves_to_a_spare_as_one() -> None:
    agents = trainer_of_two(spares=1)
    agents.silent = {2}
    agents.states = {"t0": DIED}  # it has noticed the loss long before the head does
    for now in (5.0, 30.0, 90.0):
        assert agents.decide(now) is None and not agents.fleet.orders
    assert agents.decide(91.0) is None and agents.fleet.orders == {"trainer": RestartOrder(1, hold=True)}
    agents.states["t1"] = ProcessReport("waiting")  # on the spare
    assert agents.decide(91.0 + BACKOFF_S[0]) is None
    assert agents.fleet.assignment.rank_of[2] == 3 and agents.fleet.orders == {"trainer": RestartOrder(1, hold=False)}
    agents.states = {"t0": killed(1, "ready"), "t1": killed(1, "ready")}
    assert agents.decide(95.0) is None
    agents.states["t0"] = msgspec.structs.replace(DIED, generation=1)
    assert agents.decide(96.0) == Ending(Outcome.FAILED, "t0 ended with exit code 1", "t0")


@pytest.mark.parametrize("spares", [0, 1])
def test_the_death_of_a_rank_ends_the_attempt_once_the_other_nodes_are_known_to_work(spares: int) -> None:
    agents = trainer_of_two(spares)
    agents.states = {"t0": DIED}
    expected = Ending(Outcome.FAILED, "t0 ended with exit code 1", "t0")
    assert agents.decide(10.0) == (None if spares else expected)
    assert agents.decide(10.0 + VERDICT_S) == (None if spares else expected)
    assert agents.decide(11.0 + VERDICT_S) == expected


def test_a_rank_whose_gpu_failed_moves_to_a_spare() -> None:
    agents = trainer_of_two(spares=1)
    agents.states = {"t1": DIED}
    assert agents.decide(10.0) is None
    agents.unfit = {2: "GPU 3 has 2 uncorrected ECC errors"}
    assert agents.decide(12.0) is None
    assert agents.fleet.assignment.rank_of[2] == 3 and agents.fleet.orders == {"trainer": RestartOrder(1, hold=True)}


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (1, "ValueError: line 7 of data.jsonl has no messages", "ValueError: line 7 of data.jsonl has no messages"),
        (-9, "a line of its log", ""),  # the log of a killed process does not say why it died
    ],
)
def test_of_ranks_that_die_together_the_one_with_its_own_error_is_named(code: int, reason: str, error: str) -> None:
    agents = Agents(*((process("trainer", "attempt", f"trainer-rank-{i}", node=i),) for i in (0, 1)))
    agents.assigned()
    lost = ProcessReport("failed", exit_code=-9 if code < 0 else 1, reason="RuntimeError: Connection closed by peer")
    agents.states = {"trainer-rank-0": lost, "trainer-rank-1": ProcessReport("failed", exit_code=code, reason=reason)}
    ending = agents.decide(1.0)
    assert ending is not None and ending.error == error
    assert ending.suspect == ("trainer-rank-1" if error else "trainer-rank-0")


# endings


def test_an_agents_own_error_ends_the_attempt() -> None:
    fleet = Agents((process(),)).assigned()
    fleet.observe(msgspec.structs.replace(fleet.agents[0], error="NetworkError: no free port"), now=0.0)
    assert fleet.decide(1.0) == Ending(Outcome.FAILED, "node n0: NetworkError: no free port", "n0")


def test_completion_needs_trainer_and_orchestrator() -> None:
    agents = Agents((process("orchestrator", name="orchestrator"), process("trainer", "attempt", "t")))
    agents.assigned()
    agents.states = {"t": DONE}
    assert agents.decide(1.0) is None
    agents.states["orchestrator"] = DONE
    assert agents.decide(1.0) == Ending(Outcome.COMPLETED, "all steps done")


@pytest.mark.parametrize(("restart", "died"), [("attempt", "failed"), ("in_place", "backoff")])
def test_a_trainer_that_dies_after_the_last_commit_is_not_needed(restart: str, died: str) -> None:
    ranks = [process("trainer", restart, f"t{rank}") for rank in range(2)]
    agents = Agents((process("orchestrator", name="orchestrator"), *ranks))
    agents.assigned().work_is_done = True
    agents.states = {"t0": ProcessReport(died, exit_code=-11)}
    assert agents.decide(1.0) is None, "the orchestrator still writes metrics"
    agents.states["orchestrator"] = DONE
    assert agents.decide(2.0) is None, "t1 still ends"
    agents.states["t1"] = DONE
    assert agents.decide(3.0) == Ending(Outcome.COMPLETED, "all steps done")


def test_a_trainer_that_waits_for_the_ended_orchestrator_does_not_delay_the_end_for_long() -> None:
    agents = Agents((process("orchestrator", name="orchestrator"), process("trainer", "in_place", "t")))
    agents.assigned()
    agents.states = {"orchestrator": DONE}
    assert agents.decide(1.0) is None
    assert agents.decide(1.0 + RANKS_END_S) is None
    assert agents.decide(1.1 + RANKS_END_S) == Ending(Outcome.COMPLETED, "all steps done")


@pytest.mark.parametrize("state", ["waiting", "loading", "ready", "backoff"])
def test_run_without_an_orchestrator_completes_only_if_every_rank_is_done(state: str) -> None:
    agents = Agents(tuple(process("trainer", "in_place", f"t{rank}") for rank in range(2)))
    agents.assigned()
    agents.states = {"t0": DONE, "t1": ProcessReport(state)}
    assert [agents.decide(1.0), agents.decide(1.1 + RANKS_END_S)] == [None, None]
    agents.states["t1"] = DONE
    assert agents.decide(2.0 + RANKS_END_S) == Ending(Outcome.COMPLETED, "all steps done")


STALLED, UNRECOVERABLE = exit_codes.STALLED, exit_codes.UNRECOVERABLE


@pytest.mark.parametrize(
    ("code", "last_error", "message", "ending"),
    [
        (exit_codes.CHECKPOINTED, "", "", Ending(Outcome.PREEMPTED, "p checkpointed and stopped", "p")),
        (-9, "", "", Ending(Outcome.FAILED, "p was ended by signal 9", "p")),
        (1, "", "", Ending(Outcome.FAILED, "p ended with exit code 1", "p")),
        (STALLED, "", "", Ending(Outcome.FAILED, "p saw no progress: see its events", "p")),
        (STALLED, "no rollout for 100 s", "", Ending(Outcome.FAILED, "no rollout for 100 s", "p")),
        (UNRECOVERABLE, "x always fails", "E", Ending(Outcome.FAILED, "x always fails", "p", final=True)),
        (UNRECOVERABLE, "", "nan", Ending(Outcome.FAILED, "p ended with exit code 77 (nan)", "p", final=True)),
        (UNRECOVERABLE, "", "", Ending(Outcome.FAILED, "p ended with exit code 77: see its events", "p", final=True)),
    ],
)
def test_a_failed_process_ends_the_attempt(code: int, last_error: str, message: str, ending: Ending) -> None:
    agents = Agents((process(restart="attempt"),))
    agents.assigned().last_error = last_error
    agents.states = {"p": ProcessReport("failed", exit_code=code, reason=message)}
    assert agents.decide(1.0) == ending


def test_no_progress_ends_the_attempt() -> None:
    agents = Agents((process(),))
    fleet = agents.assigned()
    fleet.observe_progress((1, 1), now=10.0)
    assert agents.decide(150.0) is None
    ending = agents.decide(161.0)
    assert ending is not None and ending.reason == "no progress for 2 min 31 s"
    fleet.observe_progress((1, 2), now=161.0)
    assert agents.decide(162.0) is None


# another attempt

FAILED, PREEMPTED = Ending(Outcome.FAILED, "x"), Ending(Outcome.PREEMPTED, "x")


@pytest.fixture
def plan() -> Plan:
    return plan_of(Path("/runs/x"), (process(),), max_attempts=9)


@pytest.mark.parametrize(
    ("ending", "attempt", "fruitless", "free", "expected"),
    [
        (Ending(Outcome.COMPLETED, ""), 1, 0, 0, (False, "")),
        (Ending(Outcome.CANCELLED, ""), 1, 0, 0, (False, "")),
        (FAILED, 1, 1, 0, (True, "")),
        (FAILED, 3, 2, 0, (True, "")),
        (FAILED, 4, 3, 0, (False, "three failed attempts in a row committed nothing new")),
        (PREEMPTED, 4, 3, 0, (True, "")),
        (PREEMPTED, 9, 0, 0, (False, "this was attempt 9 of 9")),
        (PREEMPTED, 40, 0, 32, (True, "")),
        (
            PREEMPTED,
            40,
            0,
            31,
            (False, "this was attempt 9 of 9, not counting 31 that Slurm ended after they committed a step"),
        ),
        (Ending(Outcome.FAILED, "full", "shared file system"), 5, 3, 0, (True, "")),
        (Ending(Outcome.FAILED, "x", final=True), 1, 1, 0, (False, "another attempt would end in the same way")),
    ],
)
def test_requeue_rules(
    plan: Plan, ending: Ending, attempt: int, fruitless: int, free: int, expected: tuple[bool, str]
) -> None:
    assert should_requeue(ending, attempt, plan, fruitless, again=False, free=free) == expected


def test_a_job_is_not_requeued_against_the_recipe(plan: Plan) -> None:
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"requeue": False})})
    assert should_requeue(PREEMPTED, 1, plan, 0, again=False, free=1) == (False, "slurm.requeue is false")


@pytest.mark.parametrize(
    ("count", "ends", "expected"),
    [
        (fruitful_preemptions, [("preempted", None)], 0),
        (fruitful_preemptions, [("preempted", 3)], 1),
        (fruitful_preemptions, [("preempted", 3), ("preempted", 3)], 1),
        (fruitful_preemptions, [("preempted", 3), ("failed", 5), ("preempted", 8)], 2),
        (fruitful_preemptions, [("failed", 3), ("failed", 5)], 0),
        (count_fruitless_attempts, [(True, None)], 1),
        (count_fruitless_attempts, [(True, None), (True, None), (True, None)], 3),
        (count_fruitless_attempts, [(True, 5)], 0),
        (count_fruitless_attempts, [(True, 5), (True, 5), (True, 5)], 2),  # the first of them has committed step 5
        (count_fruitless_attempts, [(False, 5), (True, 5), (True, 5), (True, 5)], 3),
        (count_fruitless_attempts, [(True, 5), (True, 5), (False, 5), (True, 5)], 2),  # a preemption, or a full disk
        (count_fruitless_attempts, [(True, 5), (True, 5), (False, 6), (True, 6)], 1),
        (count_fruitless_attempts, [(True, 5), (True, 5), (True, 7)], 0),
    ],
)
def test_attempts_are_counted(count: Callable[[object], int], ends: object, expected: int) -> None:
    assert count(ends) == expected
