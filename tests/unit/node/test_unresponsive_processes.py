"""Processes that hang, under real agents: stopped by a signal, in a busy loop, as a rank that others wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from primeslurm.node.agent.node_agent import AgentTimings
from primeslurm.node.head.head import HeadTimings
from primeslurm.node.head.unresponsive_ranks import QuietThresholds
from primeslurm.plan.model import HeartbeatLimits, Process
from primeslurm.records.events.processes import ProcessContinued, ProcessExited, ProcessUnresponsive, RanksUnresponsive
from primeslurm.records.fleet import Outcome
from primeslurm.run.diagnosis.doctor import diagnose
from tests.support.plans import python
from tests.unit.node.test_agent import Running, process, start

__all__ = ["start"]

PULSE = "import os, sys, time\nfrom primeslurm.records.heartbeats import pulse\npath = sys.argv[1]\n"
# HeartbeatLimits until the file exists; then it computes for ever, once.
BUSY = PULSE + (
    "def stuck():\n    while True: pass\n"
    "first = not os.path.exists(path)\n"
    "open(path, 'a').close()\n"
    "while True:\n"
    "    pulse().enter('event loop')\n"
    "    if first and os.path.exists(path + '.go'): stuck()\n"
    "    time.sleep(0.1)\n"
)
LOOP = PULSE + "while True:\n    pulse().enter('event loop')\n    time.sleep(0.1)\n"
# A rank of three that meet in a directory; rank 1 does not come to the fourth meeting.
RANK = PULSE + (
    "rank, late = int(sys.argv[2]), int(sys.argv[3])\n"
    "for step in range(1, 1000):\n"
    "    pulse().enter('forward_backward', step)\n"
    "    if step == 4 and rank == late: time.sleep(3600)\n"
    "    pulse().count_collectives(step)\n"
    "    open(f'{path}-{step}-{rank}', 'w').close()\n"
    "    while not all(os.path.exists(f'{path}-{step}-{other}') for other in range(3)): time.sleep(0.05)\n"
)


def beating(name: str, node: int, code: str, *args: str, hang_s: int = 3, **options: object) -> Process:
    return process(name, node, python(code, *args), heartbeats=HeartbeatLimits(hang_timeout_s=hang_s), **options)


def test_a_busy_loop_is_ended_with_its_stack_in_the_log(start: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "started"
    running = start((beating("environment-e-0", 0, BUSY, str(path), role="environment"),))
    running.wait(path.exists)
    first = running.wait_state("environment-e-0", "ready")
    Path(f"{path}.go").touch()
    running.wait(lambda: running.report("environment-e-0").restarts == 1)
    again = running.wait_state("environment-e-0", "ready")
    assert again.pid != first.pid and running.head.ending is None
    [event] = running.events(ProcessUnresponsive)
    assert (event.name, event.phase) == ("environment-e-0", "event loop") and event.seconds >= 3
    [exited] = running.events(ProcessExited)
    assert exited.code == -9 and str(exited.reason).startswith("unresponsive: silent for ")
    log = (running.attempt.path / "logs/environment/environment-e-0.log").read_text()
    assert " in stuck" in log, log


def test_a_stopped_process_is_continued(start: Callable[..., Running]) -> None:
    agents = AgentTimings(term_grace_s=1.0, stopped_s=2.5)
    running = start((beating("orchestrator", 0, LOOP, "-", hang_s=600, role="orchestrator"),), agents=agents)
    running.wait(
        lambda: (running.report("orchestrator").heartbeat or 0) and running.report("orchestrator").heartbeat.number
    )  # type: ignore[union-attr]
    report = running.report("orchestrator")
    os.kill(int(str(report.pid)), signal.SIGSTOP)
    running.wait(lambda: running.events(ProcessContinued))
    number = report.heartbeat.number if report.heartbeat else 0
    running.wait(
        lambda: (
            (heartbeat := running.report("orchestrator").heartbeat)
            and heartbeat.number > number
            and heartbeat.silent_s < 1
        )
    )
    after = running.report("orchestrator")
    assert after.pid == report.pid and after.restarts == 0


def test_the_rank_that_the_others_wait_for_is_named_and_ends_the_attempt(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    agents = AgentTimings(term_grace_s=1.0, stopped_s=2.0)
    head = HeadTimings(thresholds=QuietThresholds(shown_s=2.0, ranks_share=1 / 4))  # of a limit of 8
    kind = {"role": "trainer", "restart": "attempt", "unit": "trainer"}
    args = (str(tmp_path / "met"),)
    ranks = [beating(f"trainer-rank-{i}", i % 2, RANK, *args, str(i), "1", hang_s=8, **kind) for i in range(3)]
    running = start((ranks[0], ranks[2]), (ranks[1],), agents=agents, head=head)
    running.wait(lambda: (view := running.attempt.fleet()) and view.silent)
    view = running.attempt.fleet()
    assert view is not None and set(view.silent) == {"trainer-rank-1"}
    assert view.states["trainer-rank-1"] == "SILENT" and view.states["trainer-rank-0"] == "HEALTHY"
    found = diagnose(running.run, running.attempt, lambda job: "RUNNING").first
    assert found is not None and found.failure.component == "trainer-rank-1", found
    running.join()
    assert running.head.ending is not None and running.head.ending.outcome is Outcome.FAILED
    assert running.head.ending.suspect == "trainer-rank-1"
    assert "phase forward_backward of step 4; 2 ranks wait for it" in running.head.ending.reason
    [waits] = running.events(RanksUnresponsive)
    assert (waits.behind, waits.waiting, waits.step) == (["trainer-rank-1"], 2, 4)
    running.head.conclude()
    first = diagnose(running.run, running.attempt, lambda job: None).first
    assert first is not None and first.failure.component == "trainer-rank-1"
    assert any("time.sleep" in line or "Current thread" in line or "File" in line for line in first.last_lines)
