"""The state machine of one process, and the state that operators see. The clock is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.node.agent.node_context import resolve
from primeslurm.node.agent.supervision import BACKOFF_S, ProcessState, Supervision
from primeslurm.node.head.process_states import FleetState, fleet_state
from primeslurm.plan.model import Process
from primeslurm.records.fleet import ProcessReport, RestartOrder
from primeslurm.wire import exit_codes
from primeslurm.wire.transport.addresses import Addresses
from tests.unit.node.fleet_of_agents import READY, process


def started(process: Process, now: float = 0.0) -> Supervision:
    supervision = Supervision(process)
    supervision.started(now)
    return supervision


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


def test_a_process_that_is_not_ready_in_time_is_killed() -> None:
    s = started(process())
    assert s.tick(60, prerequisites=True, ready=False) == "nothing"
    assert s.tick(61, prerequisites=True, ready=False) == "kill"
    assert s.reason == "not ready within 1 min"


@pytest.mark.parametrize(
    ("kind", "code", "ending", "expected"),
    [
        (process(), 0, False, ProcessState.BACKOFF),
        (process(), 1, False, ProcessState.BACKOFF),
        (process(), exit_codes.STALLED, False, ProcessState.FAILED),
        (process(), 1, True, ProcessState.STOPPED),
        (process(restart="unit"), 1, False, ProcessState.FALLEN),
        (process(restart="attempt"), 1, False, ProcessState.FAILED),
        (process(restart="attempt"), 0, False, ProcessState.FAILED),
        (process("trainer", "attempt", health=False), 0, False, ProcessState.DONE),
        (process("environment", health=False), 0, True, ProcessState.STOPPED),
    ],
)
def test_state_after_an_exit(kind: Process, code: int, ending: bool, expected: ProcessState) -> None:
    s = started(kind)
    s.exited(1, code, ending=ending)
    assert s.state is expected


def test_an_unresponsive_process_is_ended_once_and_dumps_its_stacks() -> None:
    s = started(process())
    s.tick(5, prerequisites=True, ready=True)
    assert s.tick(40, prerequisites=True, ready=False) == "nothing"
    assert s.tick(41, prerequisites=True, ready=False, unresponsive="why") == "dump_and_kill"
    assert s.tick(42, prerequisites=True, ready=False, unresponsive="why, later") == "nothing"
    assert s.reason == "why"


@pytest.mark.parametrize("loads", [False, True])
def test_loading_and_time_without_heartbeats_earn_no_new_restart_budget(loads: bool) -> None:
    s, now = Supervision(process("orchestrator", health=not loads)), 0.0
    for _ in range(s.process.max_restarts + 1):
        assert s.tick(now, prerequisites=True, ready=False) == "start"
        s.started(now)
        for passed in range(0, 400, 10):
            if loads:
                s.tick(now + passed, prerequisites=True, ready=passed > 350)
            else:
                s.tick(now + passed, prerequisites=True, ready=True, silent_s=passed)
        s.exited(now + 400, -9, ending=False)
        now += 500
    assert s.state is ProcessState.FAILED


def test_a_renewed_process_starts_at_once_and_without_using_its_budget() -> None:
    s = started(process())
    assert (s.renew("moved"), s.renew("moved")) == ("kill", "nothing")
    s.exited(1, -9, ending=False)
    assert (s.state, s.restarts) == (ProcessState.WAITING, 0)
    assert s.tick(1, prerequisites=True, ready=False) == "start"


def test_a_member_of_a_restart_group_follows_its_generation() -> None:
    s = started(process(unit="u"))
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


@pytest.mark.parametrize("code", [0, 1])
def test_a_trainer_rank_starts_again_with_a_new_generation_only(code: int) -> None:
    s = started(process("trainer", "attempt", health=False))
    s.exited(1.0, code, ending=False)
    for order in (None, RestartOrder(0, hold=False), RestartOrder(1, hold=True)):
        assert s.tick(2.0, prerequisites=True, ready=False, order=order) == "nothing"
    assert s.tick(2.0, prerequisites=True, ready=False, order=RestartOrder(1, hold=False)) == "start"


@given(st.lists(st.sampled_from([1, -9, -11]), min_size=1, max_size=10))
def test_restarts_are_limited(codes: list[int]) -> None:
    s, now, starts = Supervision(process()), 0.0, 0
    for code in codes:
        now += 100
        if s.tick(now, prerequisites=True, ready=False) == "start":
            s.started(now)
            starts += 1
            s.exited(now, code, ending=False)
    assert starts <= 1 + s.process.max_restarts


@pytest.mark.parametrize(
    "code", [139, -11, -9, 0, 1, exit_codes.UNRECOVERABLE, exit_codes.STALLED, exit_codes.CHECKPOINTED]
)
def test_a_worker_that_its_tasks_kill_is_restarted_without_limit(code: int) -> None:
    s, now = Supervision(process("environment", health=False)), 0.0
    for _ in range(50):
        assert s.tick(now, prerequisites=True, ready=False) == "start"
        s.started(now)
        s.tick(now, prerequisites=True, ready=True)
        s.exited(now, code, ending=False, served=True)
        assert s.state is ProcessState.BACKOFF
        now += BACKOFF_S[0]  # the wait stays short: otherwise one bad task would cost minutes


def test_a_worker_that_never_serves_is_given_up() -> None:
    s, now, starts = Supervision(process("environment", health=False)), 0.0, 0
    while s.tick(now, prerequisites=True, ready=False) == "start":
        s.started(now)
        starts += 1
        s.exited(now, -11, ending=False, served=starts == 2)
        now += 100
    assert s.state is ProcessState.FAILED and starts == 2 + 1 + s.process.max_restarts


@pytest.mark.parametrize(
    ("report", "suspect", "silent", "expected"),
    [
        (None, False, False, FleetState.STARTING),
        (ProcessReport("loading"), False, False, FleetState.LOADING),
        (ProcessReport("ready"), False, False, FleetState.STALE),
        (READY, False, False, FleetState.HEALTHY),
        (READY, True, False, FleetState.SUSPECT),
        (READY, False, True, FleetState.SILENT),
        (ProcessReport("backoff"), False, False, FleetState.RESTARTING),
        (ProcessReport("failed"), False, False, FleetState.LOST),
        (ProcessReport("done"), False, False, FleetState.DONE),
    ],
)
def test_displayed_state(report: ProcessReport | None, suspect: bool, silent: bool, expected: FleetState) -> None:
    assert fleet_state(process(), report, suspect=suspect, silent=silent, lost=False) is expected
    assert fleet_state(process(), report, suspect=suspect, silent=silent, lost=True) is FleetState.LOST


def test_a_dead_trainer_is_displayed_as_dead() -> None:
    trainer = process("trainer", "attempt")
    assert fleet_state(trainer, ProcessReport("failed"), suspect=False, silent=True, lost=False) is FleetState.DEAD


def test_placeholders_are_filled_in() -> None:
    addresses = Addresses({"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": {"http": 1}, "b": {"http": 2}})
    text = "${host} ${port:http} ${host:b} ${port:b:http} ${addr:b:http} ${tmp} {json} $HOME"
    assert resolve(text, "a", addresses, {"tmp": "/t"}) == "10.0.0.1 1 10.0.0.2 2 10.0.0.2:2 /t {json} $HOME"


@pytest.mark.parametrize("text", ["${host:c}", "${port:ssh}", "${addr:b:ssh}", "${nothing}"])
def test_unknown_placeholders_are_errors(text: str) -> None:
    with pytest.raises(KeyError, match="in "):
        resolve(text, "a", Addresses({"a": "x", "b": "y"}, {"a": {}, "b": {}}), {})
