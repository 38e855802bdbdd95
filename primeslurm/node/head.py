"""The head: watches every heartbeat, publishes addresses and the fleet's state, decides when an attempt ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from primeslurm.node.agent import FleetView, NodeAgent
from primeslurm.node.fleet import Ending, Fleet, NodeReport, Outcome, fleet_state, should_requeue
from primeslurm.node.supervisor import ProcessState
from primeslurm.plan.model import Plan
from primeslurm.run.directory import Attempt, EndRecord, RunDirectory
from primeslurm.wire import checkpoints
from primeslurm.wire.files import read_json, write_json
from primeslurm.wire.journal import Journal

PERIOD_S = 0.5
CHECKPOINT_GRACE_S = 300.0
"""Longest wait for trainers to checkpoint when an attempt ends early and no time limit presses."""
GATHER_S = 60.0
"""Longest wait for the other nodes to end."""


class Head(threading.Thread):
    """Runs beside the agent of node 0, until every node has ended or had its chance to."""

    def __init__(self, agent: NodeAgent, run: RunDirectory) -> None:
        super().__init__(daemon=True, name="head")
        self._agent = agent
        self.plan: Plan = agent.plan
        self.attempt: Attempt = agent.attempt
        self.run_directory = run
        self.fleet = Fleet(agent.plan, started_at=time.time())
        self.journal = Journal(agent.attempt.path, "head")
        self.ending: Ending | None = None
        self._asked: Ending | None = None
        self._ending_at = 0.0
        self._published = False

    def end(self, ending: Ending) -> None:
        """Ask for the end of the attempt, from any thread or signal handler."""
        self._asked = self._asked or ending

    def run(self) -> None:
        """Watch until the attempt has ended everywhere. An error of the head itself ends the attempt."""
        try:
            while not self._gathered(time.time()):
                self.tick(time.time())
                time.sleep(PERIOD_S)
        except Exception as error:
            self.ending = Ending(Outcome.FAILED, f"head: {type(error).__name__}: {error}", "head")
            self.journal.event("head_failed", error=self.ending.reason)
            self._agent.end(self.ending)

    def tick(self, now: float) -> None:
        """Read every heartbeat, decide, publish."""
        for node in self.plan.nodes:
            value = read_json(self.attempt.node_file(node.index))
            if value is not None:
                self.fleet.observe(msgspec.convert(value, NodeReport), now)
        self._observe_progress(now)
        if self.fleet.assembled and not self._published:
            self._publish_addresses()
        if self.ending is None and (found := self._cancelled() or self._asked or self.fleet.decide(now)):
            self.ending, self._ending_at = found, now
            self.journal.event("ending", outcome=found.outcome, reason=found.reason, suspect=found.suspect)
        self._publish(now)

    def conclude(self) -> bool:
        """Record how the attempt ended. Returns whether the job should be requeued."""
        ending = self.ending or Ending(Outcome.FAILED, "the head ended early")
        step = checkpoints.newest(Path(self.plan.run_dir))
        commits = {
            a.number: end.committed_step
            for a in self.run_directory.attempts()
            if (end := a.end()) is not None and end.outcome == Outcome.FAILED
        }
        if ending.outcome is Outcome.FAILED:
            commits[self.attempt.number] = step
        requeue, why_not = should_requeue(ending, self.attempt.number, self.plan, commits)
        record = EndRecord(
            outcome=ending.outcome,
            reason=ending.reason,
            suspect=ending.suspect,
            committed_step=step,
            requeued=requeue,
            why_not_requeued=why_not,
            time=time.time(),
        )
        try:
            self.attempt.record_end(record)
        except OSError as error:  # a full disk must not keep the job from being requeued
            self.journal.event("end_not_recorded", error=str(error))
        self.journal.event("ended", outcome=ending.outcome, requeued=requeue, why_not=why_not)
        return requeue

    def _cancelled(self) -> Ending | None:
        if self.attempt.cancel_file.exists():
            return Ending(Outcome.CANCELLED, "cancelled by the user")
        return None

    def _observe_progress(self, now: float) -> None:
        state = self.attempt.state("orchestrator" if self.plan.task == "rl" else "trainer-rank-0")
        marker = (state.get("step"), state.get("version"), state.get("counts", {}).get("finished"))
        if state:
            self.fleet.observe_progress(marker, now)

    def _publish_addresses(self) -> None:
        hosts = {name: report.address for report in self.fleet.nodes.values() for name in report.processes}
        ports = {name: used for report in self.fleet.nodes.values() for name, used in report.ports.items()}
        write_json(self.attempt.addresses_file, {"hosts": hosts, "ports": ports})
        self._published = True
        self.journal.event("assembled", nodes=[r.name for _, r in sorted(self.fleet.nodes.items())])

    def _publish(self, now: float) -> None:
        states, ready = {}, []
        for process in self.plan.processes():
            report = self.fleet.report(process.name)
            silence = now - self.fleet.seen_at.get(process.node, now)
            states[process.name] = str(fleet_state(process, report, silence))
            if report is not None and report.state == ProcessState.READY:
                ready.append(process.name)
        view = FleetView(time=now, ready=ready, states=states, ending=self.ending, release=self._release(now))
        try:
            write_json(self.attempt.fleet_file, msgspec.to_builtins(view))
        except OSError as error:
            self.journal.event("publish_failed", error=str(error))

    def _release(self, now: float) -> bool:
        """Whether engines and orchestrator may stop: no trainer needs them for a last checkpoint any more."""
        if self.ending is None:
            return False
        if self.ending.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
            return True
        running = (ProcessState.LOADING, ProcessState.READY)
        reports = {p.name: (p, self.fleet.report(p.name)) for p in self.plan.processes()}
        trainers = [r for p, r in reports.values() if p.role == "trainer"]
        alive = [r is not None and r.state in running for r in trainers]
        orchestrator = [r for p, r in reports.values() if p.role == "orchestrator"]
        helpless = any(r is None or r.state not in running for r in orchestrator)
        grace = min(CHECKPOINT_GRACE_S, max(self.plan.job.signal_s - 30.0, 10.0))
        checkpointing = bool(alive) and all(alive) and not helpless
        return not checkpointing or now - self._ending_at > grace

    def _gathered(self, now: float) -> bool:
        if self.ending is None:
            return False
        if all(report.ended for report in self.fleet.nodes.values()):
            return True
        return now - self._ending_at > CHECKPOINT_GRACE_S + GATHER_S
