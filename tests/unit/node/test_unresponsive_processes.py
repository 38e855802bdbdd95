"""Unresponsive processes under real agents: stopped by a signal, in a loop, and a rank that others wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.node.agent.node_agent import AgentTimings
from primeslurm.node.head.head import HeadTimings
from primeslurm.node.head.unresponsive_ranks import QuietThresholds
from primeslurm.plan.model import Process
from primeslurm.plan.supervision import HeartbeatLimits
from primeslurm.records.events.processes import ProcessContinued, ProcessExited, ProcessUnresponsive, RanksUnresponsive
from primeslurm.records.fleet import HeartbeatReport, Outcome
from primeslurm.run.diagnosis.doctor import diagnose
from tests.support.plans import process, python
from tests.unit.node.test_agent import Running, start

__all__ = ["start"]

HEADER = "import os, sys, time\nfrom primeslurm.records.heartbeats import liveness\npath = sys.argv[1]\n"
# Sends heartbeats until a file exists. The first time it then loops without end.
ENDLESS = HEADER + (
    "def stuck():\n    while True: time.sleep(0.1)\n"
    "first = not os.path.exists(path)\n"
    "open(path, 'a').close()\n"
    "while True:\n"
    "    liveness().enter('event loop')\n"
    "    if first and os.path.exists(path + '.go'): stuck()\n"
    "    time.sleep(0.1)\n"
)
LOOP = HEADER + "while True:\n    liveness().enter('event loop')\n    time.sleep(0.1)\n"
# One of three ranks that meet through files. The rank `late` does not come to the fourth meeting.
RANK = HEADER + (
    "rank, late = int(sys.argv[2]), int(sys.argv[3])\n"
    "for step in range(1, 1000):\n"
    "    liveness().enter('forward_backward', step)\n"
    "    if step == 4 and rank == late: time.sleep(3600)\n"
    "    liveness().count_collectives(step)\n"
    "    open(f'{path}-{step}-{rank}', 'w').close()\n"
    "    while not all(os.path.exists(f'{path}-{step}-{other}') for other in range(3)): time.sleep(0.05)\n"
)


@pytest.fixture(autouse=True)
def time_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than usual to run the process that writes its stacks."""
    monkeypatch.setattr("primeslurm.node.agent.process_manager.DUMP_S", 6.0)


def with_heartbeats(name: str, node: int, code: str, *args: str, limit_s: int, **options: object) -> Process:
    return process(name, node, python(code, *args), heartbeats=HeartbeatLimits(hang_timeout_s=limit_s), **options)


def test_an_endless_loop_is_ended_with_its_stack_in_the_log(start: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "started"
    running = start((with_heartbeats("environment-e-0", 0, ENDLESS, str(path), limit_s=6, role="environment"),))
    running.wait(path.exists)
    first = running.wait_state("environment-e-0", "ready")
    Path(f"{path}.go").touch()
    running.wait(lambda: running.report("environment-e-0").restarts == 1)
    assert running.wait_state("environment-e-0", "ready").pid != first.pid and running.head.ending is None
    [event] = running.events(ProcessUnresponsive)
    assert (event.name, event.phase) == ("environment-e-0", "event loop") and event.seconds >= 6
    [exited] = running.events(ProcessExited)
    assert exited.code == -9 and str(exited.reason).startswith("unresponsive: ")
    assert " in stuck" in (running.attempt.path / "logs/environment/environment-e-0.log").read_text()


def test_a_stopped_process_is_continued(start: Callable[..., Running]) -> None:
    agents = AgentTimings(term_grace_s=1.0, stopped_s=2.5)
    running = start((with_heartbeats("orchestrator", 0, LOOP, "-", limit_s=600, role="orchestrator"),), agents=agents)

    def last() -> HeartbeatReport:
        return running.report("orchestrator").heartbeat or HeartbeatReport()

    running.wait(lambda: last().number)
    before, number = running.report("orchestrator"), last().number
    os.kill(int(str(before.pid)), signal.SIGSTOP)
    running.wait(lambda: running.events(ProcessContinued))
    running.wait(lambda: last().number > number and last().silent_s < 1)
    after = running.report("orchestrator")
    assert after.pid == before.pid and after.restarts == 0


def test_the_rank_that_the_others_wait_for_is_named_and_ends_the_attempt(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    agents = AgentTimings(term_grace_s=1.0, stopped_s=2.0)
    head = HeadTimings(thresholds=QuietThresholds(shown_s=2.0, ranks_share=1 / 4))
    group = {"role": "trainer", "unit": "trainer", "limit_s": 8}
    path = str(tmp_path / "met")
    ranks = [with_heartbeats(f"trainer-rank-{i}", i % 2, RANK, path, str(i), "1", **group) for i in range(3)]  # type: ignore[arg-type]
    running = start((ranks[0], ranks[2]), (ranks[1],), agents=agents, head=head)
    view = running.wait(lambda: (view := running.attempt.fleet()) and set(view.silent) == {"trainer-rank-1"} and view)
    assert view.states["trainer-rank-1"] == "SILENT" and view.states["trainer-rank-0"] == "HEALTHY"
    first = diagnose(running.run, running.attempt, lambda job: "RUNNING").first
    assert first is not None and first.failure.component == "trainer-rank-1"
    running.join()
    ending = running.head.ending
    assert ending is not None and (ending.outcome, ending.suspect) == (Outcome.FAILED, "trainer-rank-1")
    assert "phase forward_backward of step 4; 2 ranks wait for it" in ending.reason
    [event] = running.events(RanksUnresponsive)
    assert (event.behind, event.waiting, event.step) == (["trainer-rank-1"], 2, 4)
    running.head.conclude()
    first = diagnose(running.run, running.attempt, lambda job: None).first
    assert first is not None and first.failure.component == "trainer-rank-1"
    assert any("File" in line for line in first.last_lines)
