"""The agent of one allocated node: checks the node, plays the part that the head gives it, and follows the head's end.

It survives what it runs, and speaks to the other agents through small files in the attempt directory: its heartbeat
`agents/<rank>.json`, and from the head `roster.json` (who plays which node), `addresses.json` (who listens where) and
`fleet.json` (what is ready, and the end).
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.files import FileWatcher, write_json
from primeslurm.base.unresponsive_timer import MAX_GAP_S, scheduling_delay_s
from primeslurm.node.agent.head_watch import HeadKillDetector
from primeslurm.node.agent.health_probe import TIMEOUT_S
from primeslurm.node.agent.liveness_monitor import STOPPED_S
from primeslurm.node.agent.node_context import directory_of, remove_of_earlier_attempts
from primeslurm.node.agent.process_manager import ProcessManager
from primeslurm.node.host.exit_cleanup import ExitCleanup
from primeslurm.node.host.network import NetworkError, node_name, own_address
from primeslurm.node.host.private_directory import PrivateDirectory, random_word
from primeslurm.node.host.record_writer import RecordWriter
from primeslurm.node.preflight.preflight import Preflight, PreflightTimings
from primeslurm.plan.model import Plan
from primeslurm.records.events.nodes import AgentFailed, AgentStarted, AttemptEnds, HeartbeatFailed, NodesAssigned
from primeslurm.records.fleet import (
    AgentReport,
    AssignmentRecord,
    Ending,
    FleetView,
    Outcome,
    PreflightState,
)
from primeslurm.records.journal import Journal
from primeslurm.records.reading import changed_record
from primeslurm.run.directory import BY_SIGTERM, Attempt
from primeslurm.wire.transport.addresses import Addresses

TICK_RETRY_S = 0.5
"""How long one turn of an agent or the head repeats an operation on a file: it comes back soon by itself."""


@dataclass(frozen=True)
class AgentTimings:
    """Paces and patience of an agent, in seconds."""

    tick_s: float = 0.25
    term_grace_s: float = 15.0
    """From SIGTERM to SIGKILL."""
    hurried_grace_s: float = 5.0
    """The same when Slurm has sent SIGTERM to the agent itself, which it kills soon."""
    head_wait_s: float = 10.0
    """After SIGTERM, how long the agent waits for the head to end the attempt before it ends by itself."""
    probe_timeout_s: float = TIMEOUT_S
    """For the answer of a server that is probed."""
    stopped_s: float = STOPPED_S
    """After which a process that a signal has stopped is continued."""
    preflight: PreflightTimings = field(default_factory=PreflightTimings)


class NodeAgent:
    """Runs one node's share of a Plan, or waits as a spare. `run` blocks until the attempt has ended on this node.

    Args:
        plan: the whole.
        rank: of this agent among the job's nodes.
        attempt: through whose files agents and head speak.
        run_id: the run's unique id.
        python: what `${python}` in command lines means.
        timings: paces and patience.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        attempt: Attempt,
        run_id: str,
        python: str,
        timings: AgentTimings = AgentTimings(),
    ) -> None:
        self.plan, self.rank, self.attempt = plan, rank, attempt
        self.timings = timings
        self.name = node_name()
        self.address = _address(self.name, plan)
        key = random_word()
        self.tmp = directory_of(Path(tempfile.gettempdir()), run_id, attempt.number, rank, key)
        self._directory = PrivateDirectory(self.tmp)
        self.journal = Journal(attempt.path, f"agent-{rank}")
        self.preflight = Preflight(plan, rank, self.name, attempt, self.tmp, self.journal, timings.preflight)
        self.processes: ProcessManager | None = None
        self.addresses: Addresses | None = None
        self.view = FleetView(time=0.0)
        self.error = ""
        self.head_lost = False
        self._head_watch = HeadKillDetector(plan, os.environ)
        self._values = {
            "run_dir": plan.run_dir,
            "attempt": str(attempt.number),
            "attempt_dir": str(attempt.path),
            "run_id": run_id,
            "python": python,
            "tmp": str(self.tmp),
            "key": key,
        }
        self._fleet_file = FileWatcher(attempt.fleet_file)
        self._roster_file = FileWatcher(attempt.assignment_file)
        self._addresses_file = FileWatcher(attempt.addresses_file)
        self._sweeper: ExitCleanup | None = None
        self._local_ending: Ending | None = None
        self.wall = time.time
        """Clock of what is shown to people. Everything else goes by the monotonic clock of `tick`."""
        self._last_heartbeat = -math.inf
        self._heartbeats = 0
        self._records = RecordWriter(Path(plan.run_dir), 1.5 * plan.stall_timeout_s)
        self._told = self._news()
        self._head_seen_at = self._ticked_at = time.monotonic()
        self._ending_since: float | None = None
        self._asked_to_checkpoint = False
        self._termed_at: float | None = None
        self._terminated = False
        self._terminated_at: float | None = None

    def terminate(self) -> None:
        """Take note of SIGTERM, from any thread or signal handler.

        The trainer may still write a checkpoint: the head knows for how long, and tells all agents when to stop.
        """
        self._terminated = True

    def end(self, ending: Ending) -> None:
        """Ask this node to stop what it runs, from any thread or signal handler."""
        self._local_ending = self._local_ending or ending

    @property
    def ending(self) -> Ending | None:
        """Why the attempt ends, if it does."""
        return self._local_ending or self.view.ending

    @property
    def head_silent_s(self) -> float:
        """A head that has published nothing for this long is gone: its nodes stop what they run."""
        started = self.view.time > 0.0
        return 2.0 * self.plan.node_silent_s if started else self.plan.node_start_s

    def run(self) -> None:
        """Start what there is to start and keep it running until the attempt ends."""
        self._sweeper = sweeper = ExitCleanup()
        try:
            remove_of_earlier_attempts(self.tmp)
            self._directory.make()
            sweeper.add(self.tmp)
            self.journal.note_storage_faults()
            self.journal.write(AgentStarted(self.name, self.address))
            self.preflight.start()
            while not self._finished():
                self.tick(time.monotonic())
                time.sleep(self.timings.tick_s)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.journal.write(AgentFailed(self.error))
            raise
        finally:
            if self.processes is not None:
                self.processes.close()
            self._directory.remove()
            sweeper.close()
            self._heartbeat(time.monotonic(), ended=True)

    def tick(self, now: float) -> None:
        """One turn: reap, look at what the head says, act, report. `now`: a monotonic clock, in seconds."""
        with files.within(TICK_RETRY_S):
            self._tick(now)

    def _tick(self, now: float) -> None:
        hindered = now - self._head_seen_at > MAX_GAP_S and self._records.excuses(now)
        self._head_seen_at += now - self._ticked_at if hindered else scheduling_delay_s(self._ticked_at, now)
        self._ticked_at = now
        if self._terminated and self._terminated_at is None:
            self._terminated_at = now
        ending = self.ending is not None or self._terminated
        if self.processes is not None:
            ended = self.processes.reap(now, ending=ending)
            if any(process.gpus for process in ended):
                self.preflight.check_gpus_again()
        self._read_head(now)
        waited_s = 0.0 if self._terminated_at is None else now - self._terminated_at
        if self.view.ending is None and waited_s > self.timings.head_wait_s:  # this node alone was told to end
            self.end(Ending(Outcome.CANCELLED, BY_SIGTERM))
        if self.ending is not None:
            self._wind_down(now, self.ending)
        elif self._terminated:
            pass  # nothing is started any more
        elif self.processes is not None and self.addresses is not None and self.processes.is_known(self.addresses):
            self.processes.tick(now, self.view, self.addresses)
        if self._news() != self._told or now - self._last_heartbeat >= self.plan.heartbeat_s:
            self._heartbeat(now, ended=False)

    def _news(self) -> tuple[object, ...]:
        """What the head waits for: whether the node is fit, whether its ports are claimed, how its processes are."""
        return self.preflight.verdict[0], self.processes and self.processes.states

    def _read_head(self, now: float) -> None:
        # In this order: the head publishes addresses before the orders that rely on them.
        view = changed_record(self._fleet_file, FleetView)
        self._records.unread = self._fleet_file.fault
        if view is not None:
            self.view = view
            self._head_seen_at = now
        elif now - self._head_seen_at > self.head_silent_s:
            self._lose_head(f"the head has been silent for {self.head_silent_s:.0f} s")
        elif how := self._head_watch.killed(now - self._head_seen_at, now):
            self._lose_head(f"the head's agent was killed: {how}")
        addresses = changed_record(self._addresses_file, Addresses)
        if addresses is not None:
            self.addresses = addresses
            if self.processes is not None:
                self.processes.renew(self.addresses)
        assignment = changed_record(self._roster_file, AssignmentRecord)
        if assignment is not None:
            self._take_place(assignment)

    def _lose_head(self, why: str) -> None:
        self.head_lost = True
        self.end(Ending(Outcome.FAILED, why, "head"))

    def _take_place(self, assignment: AssignmentRecord) -> None:
        index = assignment.node_of(self.rank)
        if index is not None and self.processes is None:
            node = self.plan.nodes[index]
            self.processes = ProcessManager(
                self.plan,
                node,
                self.attempt,
                self.address,
                self._values,
                self.journal,
                probe_timeout_s=self.timings.probe_timeout_s,
                stopped_s=self.timings.stopped_s,
            )
            if self._sweeper is not None:
                for directory in self.processes.scratch:
                    self._sweeper.add(directory)
            event = NodesAssigned(node=self.name, index=index, role=node.role, generation=assignment.generation)
            self.journal.write(event)
        if index is not None and self.processes is not None:
            moved = [name for name, node in assignment.moved.items() if node == index]
            self.processes.take_over([self.plan.process(name) for name in moved])
        elif index is None and self.processes is not None:
            # The head gave this node up. Whatever it still runs would be in the way of what replaces it.
            self.end(Ending(Outcome.CANCELLED, f"node {self.name} was replaced", self.name))

    def _wind_down(self, now: float, ending: Ending) -> None:
        """Trainers first, with a checkpoint if that is still possible; then everything else."""
        if self._ending_since is None:
            self._ending_since = now
            self.journal.write(AttemptEnds(ending.outcome, ending.reason))
        processes = self.processes
        if processes is None:
            return
        hurry = self._local_ending is not None or ending.outcome is Outcome.COMPLETED
        if not hurry and not self.view.release:
            if not self._asked_to_checkpoint:
                self._asked_to_checkpoint = True
                processes.send("trainer", signal.SIGUSR1)
            return
        if self._termed_at is None:
            self._termed_at = now
            processes.terminate()
        elif now - self._termed_at > (self.timings.hurried_grace_s if self._terminated else self.timings.term_grace_s):
            processes.kill()

    def _finished(self) -> bool:
        if self.processes is None:
            return self._ending_since is not None
        return self._termed_at is not None and not self.processes.children

    def _heartbeat(self, now: float, *, ended: bool) -> None:
        self._last_heartbeat = now
        self._heartbeats += 1
        processes = self.processes
        self._told = self._news()
        fitness, why = self.preflight.verdict
        report = AgentReport(
            rank=self.rank,
            name=self.name,
            address=self.address,
            time=self.wall(),
            agent_pid=os.getpid(),
            number=self._heartbeats,
            fitness=fitness,
            unfit_because=why,
            failed=self.preflight.failed,
            file_system=self.preflight.file_system,
            environments_fail=self.preflight.environments_fail if fitness is PreflightState.UNFIT else "",
            node=processes.node.index if processes else None,
            ports=processes.ports if processes else {},
            processes=processes.reports() if processes else {},
            ended=ended,
            error=self.error,
        )
        fault = self._records.fault
        try:
            self._records.write(lambda: write_json(self.attempt.agent_file(self.rank), msgspec.to_builtins(report)))
            self.journal.flush()
        except OSError as error:
            self.journal.write(HeartbeatFailed(str(error)))
        if self._records.fault and not fault:
            self.journal.write(HeartbeatFailed(self._records.fault))


def _address(name: str, plan: Plan) -> str:
    """The node's address; empty if it has none, which its preflight then says."""
    try:
        return own_address(name, plan.interface, plan.addresses, plan.allocated == 1)
    except NetworkError:
        return ""
