"""The agent of one allocated node: checks the node, runs the processes that the head assigns to it, and reports.

The agent outlives its processes. Agents and head communicate through small files in the attempt directory. An agent
writes its heartbeat `agents/<rank>.json`. The head writes `roster.json` (the node assignment), `addresses.json` (hosts
and ports of all processes) and `fleet.json` (ready processes, and the end).
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.files import FileWatcher, write_json
from primeslurm.base.private_directory import PrivateDirectory, random_word
from primeslurm.base.unresponsive_timer import MAX_GAP_S, scheduling_delay_s
from primeslurm.node.agent.health_probe import TIMEOUT_S
from primeslurm.node.agent.liveness_monitor import STOPPED_S
from primeslurm.node.agent.node_context import directory_of, remove_leftovers
from primeslurm.node.agent.process_manager import ProcessManager
from primeslurm.node.host.exit_cleanup import ExitCleanup
from primeslurm.node.host.network import NetworkError, node_name, own_address
from primeslurm.node.host.record_writer import RecordWriter
from primeslurm.node.preflight.preflight import Preflight, PreflightTimings
from primeslurm.plan.model import Plan
from primeslurm.records.events.nodes import AgentFailed, AgentStarted, AttemptEnds, HeartbeatFailed, NodesAssigned
from primeslurm.records.fleet import AgentReport, AssignmentRecord, Ending, FleetView, Outcome, PreflightState
from primeslurm.records.journal import Journal
from primeslurm.records.reading import changed_record
from primeslurm.run.directory import BY_SIGTERM, Attempt, RunDirectory
from primeslurm.slurm.launch_failures import START, JobOutput, killed_nodes, node_names
from primeslurm.wire.transport.addresses import Addresses

# How long one tick of an agent or the head retries an operation on a file. The next tick tries again anyway.
TICK_RETRY_S = 0.5
# If the head has missed this many heartbeats, the job's output is searched for its death.
HEARTBEATS_BEFORE_LOOK = 3.0
LOOK_PERIOD_S = 1.0


@dataclass(frozen=True)
class AgentTimings:
    """Periods and timeouts of an agent [s]."""

    tick_s: float = 0.25
    term_grace_s: float = 15.0  # from SIGTERM to SIGKILL
    hurried_grace_s: float = 5.0  # the same, if Slurm has sent SIGTERM to the agent itself and will kill it soon
    head_wait_s: float = 10.0  # after SIGTERM: longest wait for the head to end the attempt
    probe_timeout_s: float = TIMEOUT_S
    stopped_s: float = STOPPED_S  # time after which a process that a signal has stopped is continued
    preflight: PreflightTimings = field(default_factory=PreflightTimings)


class HeadKillDetector:
    """Finds the death of the head's agent in the job's output. srun reports it before the head's timeout.

    Without a Slurm job it finds nothing.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        names = node_names(plan, environ)
        self._head = names[0] if names else None
        path = RunDirectory(Path(plan.run_dir)).job_output(environ.get("SLURM_JOB_ID", ""))
        self._output = JobOutput(path, environ.get(START, ""))
        self._quiet_s = HEARTBEATS_BEFORE_LOOK * plan.heartbeat_s
        self._looked_at = -math.inf

    def killed(self, silent_s: float, now: float) -> str | None:
        """Return how the head's agent was killed, if its last heartbeat is `silent_s` old; None if nothing says so."""
        if self._head is None or silent_s < self._quiet_s or now - self._looked_at < LOOK_PERIOD_S:
            return None
        self._looked_at = now
        try:
            return killed_nodes(self._output.news()).get(self._head)
        except OSError:
            return None


class NodeAgent:
    """Runs the processes of one node of the Plan, or waits as a spare.

    `run` returns when the attempt has ended here.
    """

    def __init__(
        self, plan: Plan, rank: int, attempt: Attempt, run_id: str, python: str, timings: AgentTimings = AgentTimings()
    ) -> None:
        self.plan, self.rank, self.attempt = plan, rank, attempt
        self.timings = timings
        self.name = node_name()
        try:
            self.address = own_address(self.name, plan.interface, plan.addresses, plan.allocated == 1)
        except NetworkError:  # preflight reports it
            self.address = ""
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
        self._head_kills = HeadKillDetector(plan, os.environ)
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
        self._assignment_file = FileWatcher(attempt.assignment_file)
        self._addresses_file = FileWatcher(attempt.addresses_file)
        self._cleanup: ExitCleanup | None = None
        self._local_ending: Ending | None = None
        # Wall clock for times that people read. All decisions use the monotonic clock of `tick`.
        self.wall = time.time
        self._last_heartbeat = -math.inf
        self._heartbeats = 0
        self._records = RecordWriter(Path(plan.run_dir), 1.5 * plan.stall_timeout_s)
        self._reported = self._news()
        self._head_seen_at = self._ticked_at = time.monotonic()
        self._ending_since: float | None = None
        self._asked_to_checkpoint = False
        self._termed_at: float | None = None
        self._terminated = False
        self._terminated_at: float | None = None

    def terminate(self) -> None:
        """Note a SIGTERM, from any thread or signal handler.

        The trainer may still have time for a checkpoint. The head knows how much, and tells all agents when to stop.
        """
        self._terminated = True

    def end(self, ending: Ending) -> None:
        """End all processes of this node, from any thread or signal handler."""
        self._local_ending = self._local_ending or ending

    @property
    def ending(self) -> Ending | None:
        return self._local_ending or self.view.ending

    @property
    def head_timeout_s(self) -> float:
        """Time without a heartbeat of the head after which this node ends its processes [s]."""
        started = self.view.time > 0.0
        return 2.0 * self.plan.node_silent_s if started else self.plan.node_start_s

    def run(self) -> None:
        self._cleanup = cleanup = ExitCleanup()
        try:
            remove_leftovers(self.tmp)
            self._directory.make()
            cleanup.add(self.tmp)
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
            cleanup.close()
            self._heartbeat(time.monotonic(), ended=True)

    def tick(self, now: float) -> None:
        """Read the head's files, act, and report. `now`: monotonic clock [s]."""
        with files.within(TICK_RETRY_S):
            self._tick(now)

    def _tick(self, now: float) -> None:
        # The head is not blamed for time in which this agent did not run, or could not read and write files.
        excused = now - self._head_seen_at > MAX_GAP_S and self._records.excuses(now)
        self._head_seen_at += now - self._ticked_at if excused else scheduling_delay_s(self._ticked_at, now)
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
        if self.view.ending is None and waited_s > self.timings.head_wait_s:  # only this node got the SIGTERM
            self.end(Ending(Outcome.CANCELLED, BY_SIGTERM))
        if self.ending is not None:
            self._wind_down(now, self.ending)
        elif not self._terminated:  # after SIGTERM no process is started
            self._tick_processes(now)
        if self._news() != self._reported or now - self._last_heartbeat >= self.plan.heartbeat_s:
            self._heartbeat(now, ended=False)

    def _tick_processes(self, now: float) -> None:
        processes, addresses = self.processes, self.addresses
        if processes is not None and addresses is not None and processes.has_published(addresses):
            waits = self.preflight.checks_environments or self.preflight.environments_fail
            processes.tick(now, self.view, addresses, environments=not waits)

    def _news(self) -> tuple[object, ...]:
        """Return what the head waits for. A change is reported at once, without waiting for the next heartbeat."""
        preflight = self.preflight
        return preflight.checks_environments, preflight.verdict[0], self.processes and self.processes.states

    def _read_head(self, now: float) -> None:
        # The head publishes addresses before the orders that rely on them, so they are read after the orders.
        view = changed_record(self._fleet_file, FleetView)
        self._records.unread = self._fleet_file.fault
        if view is not None:
            self.view = view
            self._head_seen_at = now
        elif now - self._head_seen_at > self.head_timeout_s:
            self._lose_head(f"the head has been silent for {self.head_timeout_s:.0f} s")
        elif how := self._head_kills.killed(now - self._head_seen_at, now):
            self._lose_head(f"the head's agent was killed: {how}")
        addresses = changed_record(self._addresses_file, Addresses)
        if addresses is not None:
            self.addresses = addresses
            if self.processes is not None:
                self.processes.renew(self.addresses)
        assignment = changed_record(self._assignment_file, AssignmentRecord)
        if assignment is not None:
            try:
                self._follow(assignment)
            except NetworkError as error:  # a program has taken a fixed port since the preflight
                self.preflight.fail("ports", str(error))

    def _lose_head(self, why: str) -> None:
        self.head_lost = True
        self.end(Ending(Outcome.FAILED, why, "head"))

    def _follow(self, assignment: AssignmentRecord) -> None:
        index = assignment.node_of(self.rank)
        if index is None:
            if self.processes is not None:
                # The head has replaced this node. Its processes would interfere with their replacements.
                self.end(Ending(Outcome.CANCELLED, f"node {self.name} was replaced", self.name))
            return
        if self.processes is None:
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
            if self._cleanup is not None:
                for directory in self.processes.scratch:
                    self._cleanup.add(directory)
            event = NodesAssigned(node=self.name, index=index, role=node.role, generation=assignment.generation)
            self.journal.write(event)
        moved = [name for name, node_index in assignment.moved.items() if node_index == index]
        self.processes.take_over([self.plan.process(name) for name in moved])

    def _wind_down(self, now: float, ending: Ending) -> None:
        """End the processes: trainers first, with a checkpoint if there is time, then everything else."""
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
                processes.send("tenant-host", signal.SIGUSR1)
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
        self._reported = self._news()
        # Read first: a node is not known to load its environments before the verdict covers them.
        checks_environments = self.preflight.checks_environments
        state, why = self.preflight.verdict
        # Preflight may have found the address of a node whose name did not resolve when its agent started.
        self.address = self.address or self.preflight.address
        report = AgentReport(
            rank=self.rank,
            name=self.name,
            address=self.address,
            time=self.wall(),
            agent_pid=os.getpid(),
            number=self._heartbeats,
            fitness=state,
            unfit_because=why,
            failed=self.preflight.failed,
            file_system=self.preflight.file_system,
            checks_environments=checks_environments,
            environments_fail=self.preflight.environments_fail if state is PreflightState.UNFIT else "",
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
