"""Who counts as silent: not who is held up by a machine, a debugger or a neighbour. Clocks are set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.unresponsive_timer import MAX_GAP_S, UnresponsiveTimer
from primeslurm.node.agent.health_probe import HealthProbe
from primeslurm.node.agent.liveness_monitor import LivenessMonitor
from primeslurm.node.head.unresponsive_ranks import unresponsive_ranks
from primeslurm.node.host.process_condition import Condition
from primeslurm.plan.model import HeartbeatLimits, Process
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import HeartbeatPage, LivenessReporter

TICK_S = 0.25
LIMIT_S = 30.0
NOTHING = Condition()
SPANS = st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=30)


@dataclass
class Node:
    """A process that beats each second while it runs, and an agent that looks four times a second while it does."""

    now: float = 1000.0
    beaten_at: float = 1000.0
    waited_s: float = 0.0
    condition: Condition = NOTHING
    liveness_monitor: LivenessMonitor = field(init=False)
    page: HeartbeatPage = field(default_factory=lambda: HeartbeatPage("p"))

    def __post_init__(self) -> None:
        self.liveness_monitor = LivenessMonitor(lambda pid: self.condition._replace(waited_s=self.waited_s))
        heartbeats = HeartbeatLimits(start_timeout_s=60, hang_timeout_s=int(LIMIT_S))
        options = {"name": "p", "role": "environment", "node": 0, "argv": ("p",), "log": "l", "beats": heartbeats}
        self.liveness_monitor.started(Process.model_validate(options), 1, self.page, None)
        self.liveness = LivenessReporter(self.page._page)
        self.liveness.enter("loop")

    def run(self, seconds: float, *, process: bool = True, agent: bool = True, starved: float = 0.0) -> None:
        """Time passes, for one of them, both or neither; `starved`: share of it that the process wants a CPU and has
        none."""
        end = self.now + seconds
        while self.now < end:
            step = min(TICK_S, end - self.now)
            self.now += step
            self.waited_s += step * starved
            if process and self.now - self.beaten_at >= 1.0:
                self.beaten_at = self.now
                self.liveness.heartbeat()
            if agent:
                self.liveness_monitor.check(self.now)

    @property
    def hangs(self) -> bool:
        return self.liveness_monitor.of("p").unresponsive


@given(spans=SPANS)
def test_time_in_which_all_stood_still_makes_nobody_silent(spans: list[float]) -> None:
    """A suspended job, a machine that swaps: however long and often, the agent looks again before the process beats."""
    silence, now = UnresponsiveTimer(), 0.0
    for heartbeats, span in enumerate(spans):
        for _ in range(8):
            now += TICK_S
            assert silence.look(now, heartbeats) <= 2 * MAX_GAP_S + 8 * TICK_S
        now += span
        assert silence.look(now, heartbeats) <= 2 * MAX_GAP_S + 8 * TICK_S
        assert silence.look(now, heartbeats + 1) == 0.0


@given(spans=SPANS, excused=st.floats(0.0, 1e6))
def test_silence_never_exceeds_the_time_that_was_looked_at(spans: list[float], excused: float) -> None:
    silence, now, looked = UnresponsiveTimer(), 0.0, 0.0
    silence.look(now, 1)
    for span in spans:
        now += span
        looked += min(span, MAX_GAP_S)
        assert silence.look(now, 1, excused) <= looked + 1e-6
    assert excused < MAX_GAP_S or silence.seconds == 0.0


@given(jumps=st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_a_clock_that_is_set_makes_nobody_silent(jumps: list[float]) -> None:
    silence = UnresponsiveTimer()
    for heartbeats, jump in enumerate(jumps):
        assert silence.look(jump, heartbeats) == 0.0
        assert silence.look(jump * 2 - 7, heartbeats) <= MAX_GAP_S


def test_a_process_that_stops_beating_hangs_after_its_limit() -> None:
    node = Node()
    node.run(LIMIT_S - 1, process=False)
    assert not node.hangs
    node.run(3, process=False)  # it is looked at once a second
    assert node.hangs and "silent for 31 s, phase loop" in node.liveness_monitor.of("p").report().text
    node.run(3)
    assert not node.hangs and node.liveness_monitor.of("p").silent_s < 2


def test_a_phase_may_take_as_long_as_it_said() -> None:
    node = Node()
    node.liveness.enter("load", limit_s=7200.0)
    node.run(7000, process=False)
    assert not node.hangs
    node.liveness.enter("train", step=3)
    node.run(LIMIT_S + 2, process=False)
    assert node.hangs and node.liveness_monitor.of("p").report().text == "silent for 31 s, phase train of step 3"


@pytest.mark.parametrize("condition", [Condition(held=True), Condition()])
def test_a_debugger_a_disk_or_a_lack_of_cpus_is_no_hang(condition: Condition) -> None:
    """On a machine with far more processes than CPUs one of them may have no turn for minutes."""
    node = Node(condition=condition)
    node.run(600, process=False, starved=0.0 if condition.held else 1.0)
    assert not node.hangs
    node.condition = Condition()
    node.run(LIMIT_S + 1, process=False)
    assert node.hangs, "the same silence without an excuse"


def test_a_busy_loop_on_a_starved_machine_is_found_by_the_time_that_it_had() -> None:
    node = Node()
    node.run(2 * LIMIT_S - 4, process=False, starved=0.5)
    assert not node.hangs
    node.run(10, process=False, starved=0.5)
    assert node.hangs


def test_what_stays_silent_is_looked_at_once_a_second() -> None:
    node, looks = Node(), 0
    look = node.liveness_monitor._condition

    def counted(pid: int) -> Condition:
        nonlocal looks
        looks += 1
        return look(pid)

    node.liveness_monitor._condition = counted
    node.run(20.0, process=False)
    assert 16 <= looks <= 20
    assert 18.0 <= node.liveness_monitor.of("p").silent_s <= 20.0
    node.liveness.heartbeat()
    node.run(TICK_S, process=False)
    assert node.liveness_monitor.of("p").silent_s == 0.0


def test_an_agent_that_was_stopped_blames_nobody() -> None:
    node = Node()
    for _ in range(5):
        node.run(3600, process=False, agent=False)
        node.run(1)
        assert not node.hangs


def test_a_server_is_silent_by_the_same_rules() -> None:
    """An agent that was stopped for an hour has had no answers for an hour."""
    liveness_monitor, probe = LivenessMonitor(lambda pid: Condition()), HealthProbe.__new__(HealthProbe)
    probe.answers = 1
    health = {"port": "http", "hang_timeout_s": 20}
    options = {"name": "e", "role": "engine", "node": 0, "argv": ("e",), "log": "l", "health": health}
    liveness_monitor.started(Process.model_validate(options), 1, None, probe)
    liveness_monitor.check(0.0)
    assert liveness_monitor.of("e").report().text == "silent for 0 s"
    liveness_monitor.check(3600.0)
    assert not liveness_monitor.of("e").unresponsive
    for second in range(3601, 3620):
        liveness_monitor.check(float(second))
    assert liveness_monitor.of("e").unresponsive


def heartbeat(
    silent_s: float, collectives: int, limit_s: float = 300.0, phase: str = "forward_backward"
) -> HeartbeatReport:
    return HeartbeatReport(phase, 7, 5, collectives, silent_s, limit_s)


def test_the_rank_that_has_begun_fewer_collectives_is_the_one_that_the_others_wait_for() -> None:
    heartbeats = {f"trainer-rank-{i}": heartbeat(30.0 + i, 41 if i == 2 else 42) for i in range(4)}
    found = unresponsive_ranks(heartbeats)
    assert found is not None and found.behind == ("trainer-rank-2",) and found.waiting == 3 and not found.timed_out
    assert found.event().phase == "forward_backward" and found.event().step == 7
    hung = unresponsive_ranks(
        {name: each for name, each in heartbeats.items() if name != "trainer-rank-2"} | {"r": heartbeat(301, 41)}
    )
    assert hung is not None and hung.timed_out
    assert hung.reason == "unresponsive: silent for 301 s, phase forward_backward of step 7; 3 ranks wait for it"


def test_nobody_is_named_while_any_rank_goes_on() -> None:
    """Rank 0 asks for a batch all the time, while the others wait for its word."""
    assert unresponsive_ranks({"a": heartbeat(0.5, 41), "b": heartbeat(900, 42), "c": heartbeat(900, 42)}) is None
    assert unresponsive_ranks({"a": heartbeat(20, 41), "b": heartbeat(20, 42)}) is None, (
        "a micro batch may take so long"
    )
    assert unresponsive_ranks({}) is None


def test_ranks_that_are_all_at_the_same_collective_wait_for_the_network_or_a_gpu() -> None:
    found = unresponsive_ranks({"a": heartbeat(500, 42), "b": heartbeat(400, 42)})
    assert found is not None and found.behind == ("a", "b") and found.waiting == 0 and found.timed_out
    assert "none is behind" in found.reason
    starved = unresponsive_ranks({"a": heartbeat(500, 42), "b": heartbeat(40, 42)})
    assert starved is not None and not starved.timed_out, "one of them has not been silent for long"


def test_a_rank_that_was_stopped_in_the_midst_of_a_collective_has_begun_as_many_as_the_others() -> None:
    heartbeats = {
        "a": heartbeat(40, 42),
        "b": msgspec.structs.replace(heartbeat(40, 42), stopped=True),
        "c": heartbeat(40, 42),
    }
    found = unresponsive_ranks(heartbeats)
    assert found is not None and found.behind == ("b",) and found.waiting == 2
    waits = unresponsive_ranks(heartbeats | {"c": heartbeat(40, 41)})
    assert waits is not None and waits.behind == ("c",), "it waited when it was stopped"


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.floats(0, 1e4), st.integers(0, 9), st.floats(1, 1e4)), min_size=1
    )
)
def test_who_hangs_has_been_silent_for_longer_than_its_phase_may_take(
    ranks: dict[str, tuple[float, int, float]],
) -> None:
    heartbeats = {name: heartbeat(silent, at, limit) for name, (silent, at, limit) in ranks.items()}
    found = unresponsive_ranks(heartbeats)
    if found is None:
        return
    fewest = min(each.collectives for each in heartbeats.values())
    assert {name for name, each in heartbeats.items() if each.collectives == fewest} == set(found.behind)
    assert not found.timed_out or all(
        heartbeats[name].silent_s >= found.heartbeat.silent_s > found.heartbeat.limit_s for name in found.behind
    )
