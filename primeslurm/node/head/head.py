"""The head: reads every heartbeat, assigns nodes, publishes the state of the fleet, and decides the end."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import FileWatcher, write_json
from primeslurm.base.units import duration
from primeslurm.base.unresponsive_timer import scheduling_delay_s
from primeslurm.node.agent.node_agent import TICK_RETRY_S, NodeAgent
from primeslurm.node.agent.supervision import ProcessState
from primeslurm.node.attempt.attempt_end import conclude, record_bad_node
from primeslurm.node.head import job_end
from primeslurm.node.head.exporter import TARGETS_FILE, Exporter, RunCollector, start_exporter, targets
from primeslurm.node.head.fleet import AGENT_ENDED, Fleet, News
from primeslurm.node.head.process_states import fleet_state
from primeslurm.node.head.unresponsive_ranks import THRESHOLDS, QuietThresholds
from primeslurm.node.host.record_writer import RecordWriter
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import newest_attempt
from primeslurm.records.events.nodes import (
    AddressesPublished,
    AttemptEnds,
    FileSystemFault,
    HeadFailed,
    NodeLost,
    PublishFailed,
)
from primeslurm.records.fleet import AgentReport, AssignedAgent, AssignmentRecord, Ending, FleetView, Outcome
from primeslurm.records.journal import Journal
from primeslurm.records.reading import changed_record
from primeslurm.records.state import OrchestratorState, TrainerState
from primeslurm.run.directory import CANCEL_NOW, Attempt, RunDirectory
from primeslurm.run.history import progress_of
from primeslurm.slurm.client import KILL_WAIT_S
from primeslurm.slurm.launch_failures import (
    START,
    JobOutput,
    early_exits,
    killed_nodes,
    launch_failures,
    node_names,
    restarts,
)
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport.addresses import Addresses, unreachable

# A process is suspect if its agent has missed this many heartbeats, or been silent for a third of `node_silent_s`.
SUSPECT_HEARTBEATS = 10.0
RECORD_S = 3.0  # the head stops waiting for other nodes this long before Slurm kills it, and records the end. [s]


@dataclass(frozen=True)
class HeadTimings:
    """Period and timeouts of the head."""

    period_s: float = 0.5
    # Longest wait for last checkpoints if no time limit is near, and the plan does not expect them to take longer
    checkpoint_grace_s: float = 300.0
    gather_s: float = 60.0  # longest wait for the other nodes to end
    # A node that misses this many heartbeats at the end is not waited for. Requeueing ends what still runs there. It
    # must happen before Slurm itself starts a single component of the job again (`Plan.survives_nodes`).
    gather_heartbeats: float = 5.0
    thresholds: QuietThresholds = THRESHOLDS


class Head(threading.Thread):
    """Runs beside the agent of rank 0, until every node has ended or had its time to do so."""

    def __init__(self, agent: NodeAgent, run: RunDirectory, timings: HeadTimings = HeadTimings()) -> None:
        super().__init__(daemon=True, name="head")
        self._agent = agent
        self._timings = timings
        self.plan: Plan = agent.plan
        self.attempt: Attempt = agent.attempt
        self.run_directory = run
        # Wall clock for times that people read. All decisions use the monotonic clock of `tick`.
        self.wall = time.time
        now = time.monotonic()
        hosts = node_names(agent.plan, os.environ)
        self.fleet = Fleet(agent.plan, started_at=now, hosts=hosts, thresholds=timings.thresholds)
        self._job_output = JobOutput(run.job_output(os.environ.get("SLURM_JOB_ID", "")), os.environ.get(START, ""))
        self.journal = Journal(agent.attempt.path, "head")
        self.ending: Ending | None = None
        self._heartbeats = {rank: FileWatcher(self.attempt.agent_file(rank)) for rank in range(self.plan.allocated)}
        self._records = RecordWriter(run.path, 1.5 * agent.plan.stall_timeout_s)
        self._waits_for = ""
        self._addresses = Addresses({}, {})
        self._published_generation = 0
        self._published = FleetView(time=0.0)
        self._published_at = -math.inf
        self._exporter: Exporter | None = None
        self._published_targets: Addresses | None = None
        self._requested: Ending | None = None
        self._warned = self._terminated = 0  # signals received so far: USR2 and SIGTERM
        self._explained = (0, 0)  # the same, when their reason was last looked up
        self.requeued_by_slurm = False  # Slurm starts the job again without a request
        self._killed_at = math.inf  # when Slurm kills what still runs
        self._ending_at = 0.0
        self._ticked_at = now
        self._job_ends_at = job_end.boot_clock() + job_end.seconds_left(agent.plan, os.environ, time.time())
        self._unreadable_since: dict[int, float] = {}  # by rank, for heartbeats that cannot be read
        self._grace_s = max(agent.plan.job.signal_s - job_end.MARGIN_S, 10.0)
        self._longest_grace_s = max(timings.checkpoint_grace_s, self._grace_s)

    def end(self, ending: Ending) -> None:
        self._requested = self._requested or ending

    def terminate(self) -> None:
        """Note a SIGTERM, from any thread or signal handler: Slurm will kill the job soon."""
        self._terminated += 1

    def warn(self) -> None:
        """Note a USR2, from any thread or signal handler: the time limit is near, or Slurm preempts the job."""
        self.end(Ending(Outcome.PREEMPTED, "USR2: time limit or preemption"))
        self._warned += 1

    def run(self) -> None:
        """Tick until the attempt has ended everywhere. An error of the head itself ends the attempt."""
        collector = RunCollector(self.plan, self.attempt.number, lambda: self._published)
        self._exporter = start_exporter(self.plan, self._agent.address, collector)
        try:
            while not self._gathered(self._ticked_at):
                self.tick(time.monotonic())
                time.sleep(self._timings.period_s)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.ending = Ending(Outcome.FAILED, f"head: {message}", "head", error=message)
            self.journal.write(HeadFailed(self.ending.reason))
            self._agent.end(self.ending)
        finally:
            self._close_exporter()

    def tick(self, now: float) -> None:
        """Read the heartbeats that changed, decide, and publish. `now`: monotonic clock [s]."""
        with files.within(TICK_RETRY_S):
            self._tick(now)

    def _tick(self, now: float) -> None:
        # Agents are not blamed for time in which this head did not run, or could not read and write files.
        excused, elapsed = self._records.excuses(now), now - self._ticked_at
        if delay := elapsed if excused else scheduling_delay_s(self._ticked_at, now):
            self.fleet.excuse_all(delay)
        else:
            self.fleet.excuse_unreadable(self._unreadable_ranks(now), elapsed)
        self._ticked_at = now
        self._records.unread = ""
        self._records.fill_reserve(now)
        for file in self._heartbeats.values():
            if (report := changed_record(file, AgentReport)) is not None:
                self.fleet.observe(report, now)
        self._observe_progress(now)
        if self.fleet.hosts:
            news = self._job_news()
            self.fleet.observe_exits(launch_failures(news) | early_exits(news), now)
            self.fleet.observe_kills(killed_nodes(news))
        self._explain_signals(now)
        if self.ending is None and (ending := self._requested_end() or self.fleet.decide(now)):
            self.ending, self._ending_at = ending, now
            self.journal.write(AttemptEnds(ending.outcome, ending.reason, ending.suspect))
        self._record_news()
        self.journal.flush()
        self._records.write(lambda: self._publish_all(now))

    def conclude(self) -> bool:
        """Record how the attempt ended. Return whether the job must be requeued."""
        ending = self.ending or Ending(Outcome.FAILED, "the head ended early")
        # When a whole job is cancelled, another agent may hear of it before the head does.
        if self._requested is not None and ending.reason.endswith(AGENT_ENDED):
            ending = self._requested
        return conclude(self.plan, self.run_directory, self.attempt, ending, self.journal)

    def _explain_signals(self, now: float) -> None:
        """After a signal, ask Slurm for its reason, and for the time that is left for a last checkpoint."""
        signals = (self._warned, self._terminated)
        if signals == self._explained:
            return
        self._explained = signals
        cause = self._why_terminated() if self._terminated else self._why_warned()
        if cause is None:
            return
        self._killed_at = now + cause.left_s
        self.requeued_by_slurm = cause.requeued_by_slurm
        self._grace_s = min(cause.checkpoint_s, self._longest_grace_s)
        if self.ending is None:
            self._requested = cause.ending
            return
        self._grace_s += now - self._ending_at  # measured from `_ending_at`
        if cause.known and cause.ending.outcome is Outcome.CANCELLED and self.ending.outcome is Outcome.PREEMPTED:
            self.ending = cause.ending  # the user cancels a job during its grace time: it must not be requeued

    def _why_terminated(self) -> job_end.Termination:
        job, kill_wait_s = None, KILL_WAIT_S
        if self.plan.executor == "slurm":
            job, kill_wait_s = job_end.ask_slurm(os.environ.get("SLURM_JOB_ID", ""))
        return job_end.termination(job, restarts(os.environ), kill_wait_s, time.time())

    def _why_warned(self) -> job_end.Termination | None:
        # Only a preemption leaves less time than the warning before the time limit, which the Plan knows.
        if self.plan.executor != "slurm":
            return None
        return job_end.grace_time(*job_end.ask_slurm(os.environ.get("SLURM_JOB_ID", "")), time.time())

    def _unreadable_ranks(self, now: float) -> set[int]:
        """Return the ranks whose heartbeats cannot be read, as long as that excuses them."""
        unreadable = {rank for rank, file in self._heartbeats.items() if file.fault}
        self._unreadable_since = {rank: self._unreadable_since.get(rank, now) for rank in unreadable}
        return {rank for rank, since in self._unreadable_since.items() if now - since <= self._records.excuse_s}

    def _requested_end(self) -> Ending | None:
        """Return why the user, Slurm, the clock or a newer attempt ends the attempt; None if nothing does."""
        newest = self._records.read(lambda: newest_attempt(self.run_directory.path), otherwise=0)
        if newest > self.attempt.number:
            return Ending(Outcome.CANCELLED, f"attempt {newest} has taken over the run")
        if self._records.read(lambda: files.exists(self.attempt.cancel_file), otherwise=False):
            return Ending(Outcome.CANCELLED, "cancelled by the user")
        trainer = self._records.read(lambda: self.attempt.state("trainer-rank-0", TrainerState), otherwise=None)
        stop_s = job_end.seconds_to_stop(trainer)
        if self._requested is None and job_end.must_stop_before_warning(
            job_end.boot_clock(), self._job_ends_at, self.plan.job.signal_s, stop_s
        ):
            self._grace_s = stop_s - job_end.MARGIN_S
            reason = f"time limit: a last checkpoint may take {duration(stop_s)}, more than Slurm's warning leaves"
            return Ending(Outcome.PREEMPTED, reason)
        return self._requested

    def _job_news(self) -> str:
        """Return the new part of the job's output, where srun reports agents that cannot start or were killed."""
        try:
            return self._job_output.news()
        except OSError:
            return ""

    def _observe_progress(self, now: float) -> None:
        state = self._records.read(lambda: progress_of(self.attempt, self.plan.task), otherwise=None)
        if state is not None:
            self.fleet.observe_progress(state.marker, now)
        if isinstance(state, OrchestratorState):
            self.fleet.last_error, self.fleet.work_is_done = state.failure, state.complete

    def _record_news(self) -> None:
        news, self.fleet.news = self.fleet.news, []
        for item in news:
            self.journal.write(item.event)
            match item:
                case News(NodeLost(reason=reason), blamed=str(node)):
                    record_bad_node(self.plan, self.attempt, node, reason, self.journal)

    def _publish_all(self, now: float) -> None:
        # Agents rely on this order. What cannot be written is written in the next tick.
        self._publish_assignment()
        self._publish_addresses()
        self._publish_view(now)
        self._publish_targets()

    def _publish_targets(self) -> None:
        """Publish the addresses that Prometheus can scrape, if they have changed."""
        if self._published_targets is not self._addresses:
            head = self._exporter.address if self._exporter else None
            write_json(self.run_directory.path / TARGETS_FILE, targets(self.plan, self._addresses, head))
            self._published_targets = self._addresses

    def _close_exporter(self) -> None:
        """Stop serving metrics. Prometheus drops the targets of a run that has ended."""
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
        with contextlib.suppress(OSError):
            write_json(self.run_directory.path / TARGETS_FILE, [])

    def _publish_assignment(self) -> None:
        assignment = self.fleet.assignment
        if assignment.generation == self._published_generation:
            return
        names = {rank: agent.name for rank, agent in self.fleet.agents.items()}
        agents = {node: AssignedAgent(rank, names[rank]) for node, rank in sorted(assignment.rank_of.items())}
        record = AssignmentRecord(assignment.generation, agents, assignment.moved)
        write_json(self.attempt.assignment_file, msgspec.to_builtins(record))
        self._published_generation = assignment.generation

    def _publish_addresses(self) -> None:
        """Publish all addresses once every node is taken over. Lost processes keep their last address."""
        # A loss that ends the attempt leaves processes without an address, and none of them is given up.
        if not self.fleet.assembled or self.ending is not None:
            return
        hosts, ports = dict(self._addresses.hosts), dict(self._addresses.ports)
        for node in self.fleet.assignment.rank_of:
            agent = self.fleet.agent_of(node)
            assert agent is not None
            hosts |= dict.fromkeys(agent.processes, agent.address)
            ports |= agent.ports
        for number, process in enumerate(self.plan.processes()):
            if process.name in self.fleet.lost and process.name not in hosts:
                hosts[process.name], ports[process.name] = unreachable(number, process.ports)
        addresses = Addresses(hosts, ports, sorted(self.fleet.lost))
        if addresses == self._addresses:
            return
        write_json(self.attempt.addresses_file, msgspec.to_builtins(addresses))
        self._addresses = addresses
        self.journal.write(AddressesPublished(self.fleet.assignment.generation, addresses.lost))

    def _publish_view(self, now: float) -> None:
        fleet, quiet = self.fleet, self.fleet.quiet
        states, ready = {}, []
        suspect_s = min(SUSPECT_HEARTBEATS * self.plan.heartbeat_s, self.plan.node_silent_s / 3)
        for process in self.plan.processes():
            name, report = process.name, fleet.report(process.name)
            suspect = fleet.heartbeat_age(name, now) > suspect_s
            state = fleet_state(process, report, suspect=suspect, silent=name in quiet, lost=name in fleet.lost)
            states[name] = str(state)
            if report is not None and report.state == ProcessState.READY:
                ready.append(name)
        view = FleetView(
            time=self.wall(),
            ready=ready,
            states=states,
            units=fleet.orders,
            lost=sorted(fleet.lost),
            silent=quiet,
            hung=fleet.hung,
            ending=self.ending,
            waits_for=self._file_system_fault(),
            release=self._release(now),
            heartbeat_s=self.plan.heartbeat_s,
        )
        unchanged = view == msgspec.structs.replace(self._published, time=view.time)
        if unchanged and now - self._published_at < self.plan.heartbeat_s:
            return
        try:
            write_json(self.attempt.fleet_file, msgspec.to_builtins(view))
            self._published, self._published_at = view, now
        except OSError as error:
            if durable.may_recover(error):
                raise  # `RecordWriter` notes the fault, and the next tick tries again
            self.journal.write(PublishFailed(str(error)))

    def _file_system_fault(self) -> str:
        """Return the fault that the run waits out, and write an event when it begins or ends."""
        fault = self.fleet.waits_for or self._records.trouble
        if bool(fault) != bool(self._waits_for):
            self.journal.write(FileSystemFault(fault))
        self._waits_for = fault
        return fault

    def _release(self, now: float) -> bool:
        """Return whether engines and orchestrator may stop, because no trainer needs them for a last checkpoint."""
        if self.ending is None:
            return False
        if self.ending.outcome is Outcome.COMPLETED:
            return True
        # A failure that would repeat itself ends at once if it loses nothing.
        is_cancelled = self.ending.outcome is Outcome.CANCELLED
        if is_cancelled and self._cancelled_now():
            return True
        if self.plan.task == "tenants":
            checkpointing = self._all_run("tenant-host")
        elif (is_cancelled or self.ending.final) and self._all_saved():
            return True
        else:
            checkpointing = self._all_run("trainer") and self._all_run("orchestrator", none=True)
        return not checkpointing or now - self._ending_at > self._grace_s

    def _cancelled_now(self) -> bool:
        with contextlib.suppress(OSError):
            return files.read_text(self.attempt.cancel_file) == CANCEL_NOW
        return False

    def _all_saved(self) -> bool:
        """Return whether a checkpoint contains the last trained step, or nothing was trained."""
        trainer = self.attempt.state("trainer-rank-0", TrainerState)
        if trainer is None or trainer.step is None:
            return True
        return trainer.step == (checkpoints.newest(self.run_directory.path) or 0)

    def _all_run(self, role: str, *, none: bool = False) -> bool:
        """Return whether all processes of a role run. `none`: the answer if the Plan has none."""
        reports = [self.fleet.report(p.name) for p in self.plan.processes() if p.role == role]
        running = (ProcessState.LOADING, ProcessState.READY)
        return all(r is not None and r.state in running for r in reports) if reports else none

    def _has_ended(self, rank: int, now: float) -> bool:
        timeout_s = self._timings.gather_heartbeats * self.plan.heartbeat_s
        return self.fleet.agents[rank].ended or now - self.fleet.seen_at[rank] > timeout_s

    def _gathered(self, now: float) -> bool:
        if self.ending is None:
            return False
        if all(self._has_ended(rank, now) for rank in self.fleet.agents):
            return True
        late = now - self._ending_at > self._grace_s + self._timings.gather_s
        return late or now > self._killed_at - RECORD_S
