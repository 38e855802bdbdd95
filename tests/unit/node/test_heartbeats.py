"""Liveness of processes, and trainer ranks that keep the others waiting. The clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.unresponsive_timer import MAX_GAP_S, UnresponsiveTimer
from primeslurm.node.agent.health_probe import HealthProbe
from primeslurm.node.agent.liveness_monitor import Condition, Liveness, LivenessMonitor
from primeslurm.node.head.unresponsive_ranks import unresponsive_ranks
from primeslurm.plan.model import Process
from primeslurm.plan.supervision import HeartbeatLimits
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import HeartbeatPage, LivenessReporter

TICK_S = 0.25
LIMIT_S = 30.0
SPANS = st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=30)


@dataclass
class Node:
    """A process that sends a heartbeat each second while it runs, and an agent that checks it four times a second."""

    now: float = 1000.0
    sent_at: float = 1000.0
    waited_s: float = 0.0
    condition: Condition = field(default_factory=Condition)
    look_ups: int = 0

    def __post_init__(self) -> None:
        page = HeartbeatPage("p")
        self.monitor = LivenessMonitor(self.look_up)
        limits = HeartbeatLimits(start_timeout_s=60, hang_timeout_s=int(LIMIT_S))
        process = Process(name="p", role="environment", node=0, argv=("p",), log="l", heartbeats=limits)
        self.monitor.started(process, 1, page, None)
        self.process = LivenessReporter(page._page)
        self.process.enter("loop")

    def look_up(self, pid: int) -> Condition:
        self.look_ups += 1
        return self.condition._replace(waited_s=self.waited_s)

    def run(self, seconds: float, *, process: bool = True, agent: bool = True, starved: float = 0.0) -> None:
        """Let time pass. The process waits for a CPU in the fraction `starved` of it."""
        end = self.now + seconds
        while self.now < end:
            step = min(TICK_S, end - self.now)
            self.now += step
            self.waited_s += step * starved
            if process and self.now - self.sent_at >= 1.0:
                self.sent_at = self.now
                self.process.heartbeat()
            if agent:
                self.monitor.check(self.now)

    @property
    def liveness(self) -> Liveness:
        return self.monitor.of("p")


@given(spans=SPANS)
def test_time_in_which_the_whole_machine_stops_does_not_count(spans: list[float]) -> None:
    timer, now = UnresponsiveTimer(), 0.0
    for number, span in enumerate(spans):
        for gap in (*[TICK_S] * 8, span):
            now += gap
            assert timer.look(now, number) <= 2 * MAX_GAP_S + 8 * TICK_S
        assert timer.look(now, number + 1) == 0.0


@given(spans=SPANS, excused=st.floats(0.0, 1e6))
def test_only_time_between_close_looks_counts(spans: list[float], excused: float) -> None:
    timer, now, longest = UnresponsiveTimer(), 0.0, 0.0
    timer.look(now, 1)
    for span in spans:
        now += span
        longest += min(span, MAX_GAP_S)
        assert timer.look(now, 1, excused) <= longest + 1e-6
    assert excused < MAX_GAP_S or timer.seconds == 0.0


@given(jumps=st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_a_clock_that_jumps_makes_nobody_unresponsive(jumps: list[float]) -> None:
    timer = UnresponsiveTimer()
    for number, jump in enumerate(jumps):
        assert timer.look(jump, number) == 0.0
        assert timer.look(jump * 2 - 7, number) <= MAX_GAP_S


def test_a_process_without_heartbeats_is_unresponsive_after_its_timeout() -> None:
    node = Node()
    node.run(LIMIT_S - 1, process=False)
    assert not node.liveness.unresponsive
    node.run(3, process=False)
    assert node.liveness.unresponsive and "silent for 31 s, phase loop" in node.liveness.report().text
    node.run(3)
    assert not node.liveness.unresponsive and node.liveness.silent_s < 2


def test_a_phase_may_have_its_own_timeout() -> None:
    node = Node()
    node.process.enter("load", limit_s=7200.0)
    node.run(7000, process=False)
    assert not node.liveness.unresponsive
    node.process.enter("train", step=3)
    node.run(LIMIT_S + 2, process=False)
    assert node.liveness.unresponsive and node.liveness.report().text == "silent for 31 s, phase train of step 3"


@pytest.mark.parametrize("condition", [Condition(held=True), Condition()])
def test_a_debugger_a_disk_or_a_lack_of_cpus_is_an_excuse(condition: Condition) -> None:
    node = Node(condition=condition)
    node.run(600, process=False, starved=0.0 if condition.held else 1.0)
    assert not node.liveness.unresponsive
    node.condition = Condition()
    node.run(LIMIT_S + 1, process=False)
    assert node.liveness.unresponsive


def test_a_busy_loop_on_a_starved_machine_is_unresponsive_by_its_cpu_time() -> None:
    node = Node()
    node.run(2 * LIMIT_S - 4, process=False, starved=0.5)
    assert not node.liveness.unresponsive
    node.run(10, process=False, starved=0.5)
    assert node.liveness.unresponsive


def test_a_quiet_process_is_looked_up_once_a_second() -> None:
    node = Node()
    node.run(20.0, process=False)
    assert 16 <= node.look_ups <= 20 and 18.0 <= node.liveness.silent_s <= 20.0
    node.process.heartbeat()
    node.run(TICK_S, process=False)
    assert node.liveness.silent_s == 0.0


def test_an_agent_that_was_stopped_blames_nobody() -> None:
    node = Node()
    for _ in range(5):
        node.run(3600, process=False, agent=False)
        node.run(1)
        assert not node.liveness.unresponsive


def test_answers_of_a_server_count_as_heartbeats() -> None:
    monitor, probe = LivenessMonitor(lambda pid: Condition()), HealthProbe.__new__(HealthProbe)
    probe.answers = 1
    health = {"port": "http", "hang_timeout_s": 20}
    options = {"name": "e", "role": "engine", "node": 0, "argv": ("e",), "log": "l", "health": health}
    monitor.started(Process.model_validate(options), 1, None, probe)
    for now in (0.0, 3600.0):
        monitor.check(now)
        assert not monitor.of("e").unresponsive
    for second in range(3601, 3620):
        monitor.check(float(second))
    assert monitor.of("e").unresponsive


def heartbeat(silent_s: float, collectives: int, limit_s: float = 300.0, *, stopped: bool = False) -> HeartbeatReport:
    return HeartbeatReport("forward_backward", 7, 5, collectives, silent_s, limit_s, stopped)


def test_the_rank_that_has_begun_fewer_collectives_is_behind() -> None:
    heartbeats = {f"trainer-rank-{i}": heartbeat(30.0 + i, 41 if i == 2 else 42) for i in range(4)}
    ranks = unresponsive_ranks(heartbeats)
    assert ranks is not None and ranks.behind == ("trainer-rank-2",) and ranks.waiting == 3 and not ranks.timed_out
    assert (ranks.event().phase, ranks.event().step) == ("forward_backward", 7)
    ranks = unresponsive_ranks(heartbeats | {"trainer-rank-2": heartbeat(301, 41)})
    assert ranks is not None and ranks.timed_out
    assert ranks.reason == "unresponsive: silent for 301 s, phase forward_backward of step 7; 3 ranks wait for it"


@pytest.mark.parametrize(
    "heartbeats",
    [
        {"a": heartbeat(0.5, 41), "b": heartbeat(900, 42), "c": heartbeat(900, 42)},  # rank 0 polls for a batch
        {"a": heartbeat(20, 41), "b": heartbeat(20, 42)},  # a micro batch may take that long
        {},
    ],
)
def test_no_rank_is_named_while_any_makes_progress(heartbeats: dict[str, HeartbeatReport]) -> None:
    assert unresponsive_ranks(heartbeats) is None


def test_ranks_in_the_same_collective_are_all_behind() -> None:
    ranks = unresponsive_ranks({"a": heartbeat(500, 42), "b": heartbeat(400, 42)})
    assert ranks is not None and ranks.behind == ("a", "b") and ranks.waiting == 0 and ranks.timed_out
    assert "none is behind" in ranks.reason
    ranks = unresponsive_ranks({"a": heartbeat(500, 42), "b": heartbeat(40, 42)})
    assert ranks is not None and not ranks.timed_out


def test_a_rank_that_was_stopped_within_a_collective_is_behind() -> None:
    heartbeats = {"a": heartbeat(40, 42), "b": heartbeat(40, 42, stopped=True), "c": heartbeat(40, 42)}
    ranks = unresponsive_ranks(heartbeats)
    assert ranks is not None and ranks.behind == ("b",) and ranks.waiting == 2
    ranks = unresponsive_ranks(heartbeats | {"c": heartbeat(40, 41)})
    assert ranks is not None and ranks.behind == ("c",), "the stopped rank was waiting"


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.floats(0, 1e4), st.integers(0, 9), st.floats(1, 1e4)), min_size=1
    )
)
def test_ranks_are_ended_after_the_timeout_of_their_phase(values: dict[str, tuple[float, int, float]]) -> None:
    heartbeats = {name: heartbeat(silent, number, limit) for name, (silent, number, limit) in values.items()}
    ranks = unresponsive_ranks(heartbeats)
    if ranks is None:
        return
    fewest = min(each.collectives for each in heartbeats.values())
    assert {name for name, each in heartbeats.items() if each.collectives == fewest} == set(ranks.behind)
    newest = ranks.heartbeat
    assert all(heartbeats[name].silent_s >= newest.silent_s for name in ranks.behind)
    assert not ranks.timed_out or newest.silent_s > newest.limit_s
    assert msgspec.to_builtins(ranks.event())["behind"] == list(ranks.behind)
