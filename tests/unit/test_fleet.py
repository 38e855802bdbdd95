"""The pure state machines of agents and head, with an injected clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.node.fleet import (
    NODE_SILENT_S,
    NODE_START_S,
    Ending,
    Fleet,
    FleetState,
    NodeReport,
    Outcome,
    ProcessReport,
    fleet_state,
    should_requeue,
)
from primeslurm.node.resolve import Addresses, UnknownPlaceholder, resolve
from primeslurm.node.supervisor import BACKOFF_S, ProcessState, Supervision
from primeslurm.plan.model import Health, Plan, Process
from primeslurm.wire import exits
from tests.support.plans import plan_of


def process(role: str = "engine", restart: str = "in_place", name: str = "p", health: bool = True) -> Process:
    return Process.model_validate(
        {
            "name": name,
            "role": role,
            "node": 0,
            "argv": ("x",),
            "log": "x.log",
            "restart": restart,
            "max_restarts": 2,
            "health": Health(port="http", start_timeout_s=60) if health else None,
        }
    )


def fleet(*processes: Process) -> Fleet:
    return Fleet(plan_of(Path("/runs/x"), processes, stall_timeout_s=100), started_at=0.0)


def heartbeat(time: float = 0.0, error: str = "", **states: ProcessReport) -> NodeReport:
    processes = {name.replace("_", "-"): report for name, report in states.items()}
    return NodeReport(0, "n001", "127.0.0.1", time, 1, {}, processes, error=error)


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
    assert s.reason == "not ready within 60 s"


@pytest.mark.parametrize(
    ("restart", "code", "ending", "expected"),
    [
        ("in_place", 0, False, ProcessState.DONE),
        ("in_place", 1, False, ProcessState.BACKOFF),
        ("in_place", exits.STALLED, False, ProcessState.FAILED),
        ("attempt", 1, False, ProcessState.FAILED),
        ("attempt", 0, False, ProcessState.DONE),
        ("in_place", 1, True, ProcessState.STOPPED),
    ],
)
def test_what_an_exit_means(restart: str, code: int, ending: bool, expected: ProcessState) -> None:
    s = Supervision(process(restart=restart))
    s.started(0)
    s.exited(1, code, ending=ending)
    assert s.state is expected


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


READY = ProcessReport(state="ready", healthy=True)


@pytest.mark.parametrize(
    ("report", "silence", "expected"),
    [
        (None, 0.0, FleetState.STARTING),
        (ProcessReport(state="loading"), 0.0, FleetState.LOADING),
        (ProcessReport(state="ready", healthy=False), 0.0, FleetState.STALE),
        (READY, 0.0, FleetState.HEALTHY),
        (READY, 60.0, FleetState.SUSPECT),
        (ProcessReport(state="backoff"), 0.0, FleetState.RESTARTING),
        (ProcessReport(state="failed"), 0.0, FleetState.LOST),
        (ProcessReport(state="done"), 0.0, FleetState.DONE),
    ],
)
def test_operators_words(report: ProcessReport | None, silence: float, expected: FleetState) -> None:
    assert fleet_state(process(), report, silence) is expected


def test_a_dead_trainer_is_dead_not_lost() -> None:
    report = ProcessReport(state="failed")
    assert fleet_state(process("trainer", "attempt"), report, 0) is FleetState.DEAD


def test_a_silent_node_ends_the_attempt_and_is_named() -> None:
    f = fleet(process())
    f.observe(heartbeat(time=5.0, p=READY), now=10.0)
    f.observe(heartbeat(time=5.0, p=READY), now=99.0)
    assert f.decide(10.0 + NODE_SILENT_S) is None
    ending = f.decide(11.0 + NODE_SILENT_S)
    assert ending is not None and ending.suspect == "n001"
    f.observe(heartbeat(time=6.0, p=READY), now=101.0)
    assert f.decide(102.0) is None


def test_a_node_that_never_reports_ends_the_attempt() -> None:
    f = fleet(process())
    assert f.decide(NODE_START_S) is None
    ending = f.decide(NODE_START_S + 1)
    assert ending == Ending(Outcome.FAILED, "no sign of nodes [0] within 300 s", "node 0")


def test_an_agents_own_error_ends_the_attempt() -> None:
    f = fleet(process())
    f.observe(heartbeat(error="NetworkError: no free port"), now=0.0)
    assert f.decide(1.0) == Ending(Outcome.FAILED, "node n001: NetworkError: no free port", "n001")


def test_completion_needs_trainer_and_orchestrator() -> None:
    f = fleet(process("orchestrator", name="orchestrator"), process("trainer", "attempt", "t"))
    done = ProcessReport(state="done", exit_code=0)
    f.observe(heartbeat(orchestrator=READY, t=done), now=0.0)
    assert f.decide(1.0) is None
    f.observe(heartbeat(time=1.0, orchestrator=done, t=done), now=1.0)
    assert f.decide(1.0) == Ending(Outcome.COMPLETED, "all steps done")


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        (exits.CHECKPOINTED, Outcome.PREEMPTED, "p checkpointed and stopped"),
        (exits.STALLED, Outcome.FAILED, "p saw no progress: see its events"),
        (-9, Outcome.FAILED, "p was ended by signal 9"),
        (1, Outcome.FAILED, "p ended with exit code 1"),
    ],
)
def test_failed_processes_end_the_attempt(code: int, outcome: Outcome, reason: str) -> None:
    f = fleet(process())
    f.observe(heartbeat(p=ProcessReport(state="failed", exit_code=code)), now=0.0)
    assert f.decide(1.0) == Ending(outcome, reason, "p")


def test_no_progress_is_a_stall() -> None:
    f = fleet(process())
    f.observe(heartbeat(p=READY), now=0.0)
    f.observe_progress((1, 1), now=10.0)
    f.seen_at[0] = 170.0
    assert f.decide(150.0) is None
    ending = f.decide(161.0)
    assert ending is not None and ending.reason == "no progress for 151 s"
    f.observe_progress((1, 2), now=161.0)
    assert f.decide(162.0) is None


FAILED, PREEMPTED = Ending(Outcome.FAILED, "x"), Ending(Outcome.PREEMPTED, "x")


@pytest.mark.parametrize(
    ("ending", "attempt", "commits", "expected"),
    [
        (Ending(Outcome.COMPLETED, ""), 1, {}, (False, "")),
        (Ending(Outcome.CANCELLED, ""), 1, {}, (False, "")),
        (FAILED, 1, {1: None}, (True, "")),
        (FAILED, 3, {1: None, 2: 5, 3: 5}, (True, "")),
        (FAILED, 4, {2: 5, 3: 5, 4: 5}, (False, "three failed attempts in a row committed nothing new")),
        (PREEMPTED, 4, {2: 5, 3: 5, 4: 5}, (True, "")),
        (PREEMPTED, 9, {}, (False, "this was attempt 9 of 9")),
    ],
)
def test_requeue_rules(
    ending: Ending, attempt: int, commits: dict[int, int | None], expected: tuple[bool, str]
) -> None:
    plan: Plan = plan_of(Path("/runs/x"), (process(),), max_attempts=9)
    assert should_requeue(ending, attempt, plan, commits) == expected


def test_placeholders() -> None:
    addresses = Addresses({"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": {"http": 1}, "b": {"http": 2}})
    text = "${host} ${port:http} ${host:b} ${port:b:http} ${addr:b:http} ${tmp} {json} $HOME"
    assert resolve(text, "a", addresses, {"tmp": "/t"}) == "10.0.0.1 1 10.0.0.2 2 10.0.0.2:2 /t {json} $HOME"


@pytest.mark.parametrize("text", ["${host:c}", "${port:ssh}", "${addr:b:ssh}", "${nothing}"])
def test_unknown_placeholders_are_errors(text: str) -> None:
    addresses = Addresses({"a": "x", "b": "y"}, {"a": {}, "b": {}})
    with pytest.raises(UnknownPlaceholder):
        resolve(text, "a", addresses, {})
