"""The head: watches every heartbeat, gives nodes their parts, publishes the fleet's state, decides the end."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass

import msgspec

from primeslurm.base import files
from primeslurm.base.files import FileWatcher, write_json
from primeslurm.base.units import duration
from primeslurm.base.unresponsive_timer import scheduling_delay_s
from primeslurm.node.agent.node_agent import TICK_RETRY_S, NodeAgent
from primeslurm.node.agent.supervision import ProcessState
from primeslurm.node.attempt.attempt_end import conclude, record_bad_node
from primeslurm.node.head.fleet import AGENT_ENDED, Fleet, News
from primeslurm.node.head.process_states import fleet_state
from primeslurm.node.head.termination import Termination, ask_slurm, grace_time, termination
from primeslurm.node.head.unresponsive_ranks import PATIENCE, Patience
from primeslurm.node.head.walltime import MARGIN_S, boot_clock, ends_too_late, seconds_left, seconds_to_stop
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
from primeslurm.records.reserve import may_pass
from primeslurm.records.state import OrchestratorState, TrainerState
from primeslurm.run.directory import CANCEL_NOW, Attempt, RunDirectory
from primeslurm.run.records import progress_of
from primeslurm.slurm.client import KILL_WAIT_S
from primeslurm.slurm.launch_failures import (
    START,
    JobOutput,
    early_exits,
    kills,
    launch_failures,
    node_names,
    restarts,
)
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport.addresses import Addresses

SUSPECT = 10.0
"""Who has not been heard of for so many heartbeats, or a third of `node_silent_s`, is not called healthy any more."""


RECORD_S = 3.0
"""The head stops waiting for other nodes this long before Slurm kills it, and records the end. [s]"""


@dataclass(frozen=True)
class HeadTimings:
    """Pace and patience of the head, in seconds."""

    period_s: float = 0.5
    checkpoint_grace_s: float = 300.0
    """Longest wait for trainers to checkpoint when an attempt ends early and no time limit presses."""
    gather_s: float = 60.0
    """Longest wait for the other nodes to end."""
    gather_silent: float = 5.0
    """A node that says nothing for so many heartbeats at the end is not waited for. Requeueing ends what still runs
    there, and must come before Slurm starts a component anew by itself (`Plan.survives_nodes`)."""
    silence: Patience = PATIENCE
    """With processes that say nothing."""


class Head(threading.Thread):
    """Runs beside the agent of rank 0, until every node has ended or had its chance to.

    Args:
        agent: of the same node.
        run: the run's directory.
        timings: pace and patience.
    """

    def __init__(self, agent: NodeAgent, run: RunDirectory, timings: HeadTimings = HeadTimings()) -> None:
        super().__init__(daemon=True, name="head")
        self._agent = agent
        self._timings = timings
        self.plan: Plan = agent.plan
        self.attempt: Attempt = agent.attempt
        self.run_directory = run
        hosts = node_names(agent.plan, os.environ)
        self.wall = time.time
        """Clock of what is shown to people. Everything else goes by the monotonic clock of `tick`."""
        now = time.monotonic()
        self.fleet = Fleet(agent.plan, started_at=now, hosts=hosts, patience=timings.silence)
        self._job_output = JobOutput(run.job_output(os.environ.get("SLURM_JOB_ID", "")), os.environ.get(START, ""))
        self.journal = Journal(agent.attempt.path, "head")
        self.ending: Ending | None = None
        self._heartbeats = {rank: FileWatcher(self.attempt.agent_file(rank)) for rank in range(self.plan.allocated)}
        self._records = RecordWriter(run.path, 1.5 * agent.plan.stall_timeout_s)
        self._waits_for = ""
        self._addresses = Addresses({}, {})
        self._published_generation = 0
        self._told = FleetView(time=0.0)
        self._asked: Ending | None = None
        self._warned = self._terminated = 0
        """How often, by USR2 and by SIGTERM."""
        self._looked = (0, 0)
        """The same when the reason was looked for last."""
        self._requeued_by_slurm = False
        self._killed_at = math.inf
        """When Slurm kills what still runs."""
        self._ending_at = 0.0
        self._told_at = -math.inf
        self._ticked_at = now
        self._ends_at = boot_clock() + seconds_left(agent.plan, os.environ, time.time())
        self._unread: dict[int, float] = {}
        """Ranks of agents whose heartbeats cannot be read, and since when."""
        self._grace_s = min(timings.checkpoint_grace_s, max(agent.plan.job.signal_s - MARGIN_S, 10.0))

    def end(self, ending: Ending) -> None:
        """Ask for the end of the attempt, from any thread or signal handler."""
        self._asked = self._asked or ending

    def terminate(self) -> None:
        """Take note of SIGTERM, from any thread or signal handler: the job's processes will be killed soon."""
        self._terminated += 1

    def warn(self) -> None:
        """Take note of USR2, from any thread or signal handler: the time limit comes, or Slurm preempts the job."""
        self.end(Ending(Outcome.PREEMPTED, "USR2: time limit or preemption"))
        self._warned += 1

    @property
    def requeued_by_slurm(self) -> bool:
        """Whether Slurm starts the job again without being asked to."""
        return self._requeued_by_slurm

    def run(self) -> None:
        """Watch until the attempt has ended everywhere. An error of the head itself ends the attempt."""
        try:
            while not self._gathered(self._ticked_at):
                self.tick(time.monotonic())
                time.sleep(self._timings.period_s)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.ending = Ending(Outcome.FAILED, f"head: {message}", "head", error=message)
            self.journal.write(HeadFailed(self.ending.reason))
            self._agent.end(self.ending)

    def tick(self, now: float) -> None:
        """Read every heartbeat that changed, decide, publish. `now`: a monotonic clock, in seconds."""
        with files.within(TICK_RETRY_S):
            self._tick(now)

    def _tick(self, now: float) -> None:
        hindered, elapsed = self._records.excuses(now), now - self._ticked_at
        if late := elapsed if hindered else scheduling_delay_s(self._ticked_at, now):
            self.fleet.held_up(late)
        else:
            self.fleet.unreadable(self._unread_for_a_while(now), elapsed)
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
            self.fleet.observe_kills(kills(news))
        self._find_out_why(now)
        if self.ending is None and (found := self._asked_to_end() or self.fleet.decide(now)):
            self.ending, self._ending_at = found, now
            self.journal.write(AttemptEnds(found.outcome, found.reason, found.suspect))
        self._tell_news()
        self.journal.flush()
        self._records.write(lambda: self._publish_all(now))

    def conclude(self) -> bool:
        """Record how the attempt ended. Returns whether the job should be requeued."""
        ending = self.ending or Ending(Outcome.FAILED, "the head ended early")
        if self._asked is not None and ending.reason.endswith(AGENT_ENDED):
            ending = self._asked  # whoever ends all agents of a job may reach another one first
        return conclude(self.plan, self.run_directory, self.attempt, ending, self.journal)

    def _find_out_why(self, now: float) -> None:
        """After a signal: learn from Slurm why it came, and until when a last checkpoint has to be written."""
        signals = (self._warned, self._terminated)
        if signals == self._looked:
            return
        self._looked = signals
        found = self._why_terminated() if self._terminated else self._why_warned()
        if found is None:
            return
        self._killed_at = now + found.left_s
        self._requeued_by_slurm = found.requeued_by_slurm
        self._grace_s = min(found.checkpoint_s, self._timings.checkpoint_grace_s)
        if self.ending is None:
            self._asked = found.ending
            return
        self._grace_s += now - self._ending_at  # which is counted from when the attempt began to end
        if found.known and found.ending.outcome is Outcome.CANCELLED and self.ending.outcome is Outcome.PREEMPTED:
            self.ending = found.ending  # the user cancels a job that is about to be requeued

    def _why_terminated(self) -> Termination:
        job, kill_wait_s = None, KILL_WAIT_S
        if self.plan.executor == "slurm":
            job, kill_wait_s = ask_slurm(os.environ.get("SLURM_JOB_ID", ""))
        return termination(job, restarts(os.environ), kill_wait_s, time.time())

    def _why_warned(self) -> Termination | None:
        """Only a preemption has less time than the time limit's warning, which the plan knows."""
        if self.plan.executor != "slurm":
            return None
        return grace_time(*ask_slurm(os.environ.get("SLURM_JOB_ID", "")), time.time())

    def _unread_for_a_while(self, now: float) -> set[int]:
        """Ranks whose heartbeats could not be read at the last look, as long as that is excused."""
        unread = {rank for rank, file in self._heartbeats.items() if file.fault}
        self._unread = {rank: self._unread.get(rank, now) for rank in unread}
        return {rank for rank, since in self._unread.items() if now - since <= self._records.patience_s}

    def _asked_to_end(self) -> Ending | None:
        """By the user, by Slurm, by the clock, or because a newer attempt owns the run."""
        newest = self._records.read(lambda: newest_attempt(self.run_directory.path), otherwise=0)
        if newest > self.attempt.number:
            return Ending(Outcome.CANCELLED, f"attempt {newest} has taken over the run")
        if self._records.read(lambda: files.exists(self.attempt.cancel_file), otherwise=False):
            return Ending(Outcome.CANCELLED, "cancelled by the user")
        trainer = self._records.read(lambda: self.attempt.state("trainer-rank-0", TrainerState), otherwise=None)
        stop_s = seconds_to_stop(trainer)
        if self._asked is None and ends_too_late(boot_clock(), self._ends_at, self.plan.job.signal_s, stop_s):
            self._grace_s = stop_s - MARGIN_S
            reason = f"time limit: a last checkpoint may take {duration(stop_s)}, more than Slurm's warning leaves"
            return Ending(Outcome.PREEMPTED, reason)
        return self._asked

    def _job_news(self) -> str:
        """What was written into the job's output since the last look.

        Where an agent cannot be started or is killed, srun says so at once; without that, only its silence would tell.
        """
        try:
            return self._job_output.news()
        except OSError:
            return ""

    def _observe_progress(self, now: float) -> None:
        state = self._records.read(lambda: progress_of(self.attempt, self.plan.task), otherwise=None)
        if state is not None:
            self.fleet.observe_progress(state.marker, now)
        if isinstance(state, OrchestratorState):
            self.fleet.last_words = state.failure

    def _tell_news(self) -> None:
        news, self.fleet.news = self.fleet.news, []
        for item in news:
            self.journal.write(item.event)
            match item:
                case News(NodeLost(reason=reason), blamed=str(node)):
                    record_bad_node(self.plan, self.attempt, node, reason, self.journal)

    def _publish_all(self, now: float) -> None:
        """In this order: agents rely on it. What cannot be written is written with the next turn."""
        self._publish_assignment()
        self._publish_addresses()
        self._publish(now)

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
        """Who listens where, once everybody does. What was given up keeps its last address."""
        if not self.fleet.assembled:
            return
        hosts, ports = dict(self._addresses.hosts), dict(self._addresses.ports)
        for node in self.fleet.assignment.rank_of:
            agent = self.fleet.agent_of(node)
            assert agent is not None
            hosts |= dict.fromkeys(agent.processes, agent.address)
            ports |= agent.ports
        addresses = Addresses(hosts, ports, sorted(self.fleet.lost))
        if addresses == self._addresses:
            return
        write_json(self.attempt.addresses_file, msgspec.to_builtins(addresses))
        self._addresses = addresses
        self.journal.write(AddressesPublished(self.fleet.assignment.generation, addresses.lost))

    def _publish(self, now: float) -> None:
        fleet, silent = self.fleet, self.fleet.silent
        states, ready = {}, []
        limit_s = min(SUSPECT * self.plan.heartbeat_s, self.plan.node_silent_s / 3)
        for process in self.plan.processes():
            report = fleet.report(process.name)
            suspect = fleet.silence(process.name, now) > limit_s
            seen = {"suspect": suspect, "silent": process.name in silent, "lost": process.name in fleet.lost}
            states[process.name] = str(fleet_state(process, report, **seen))
            if report is not None and report.state == ProcessState.READY:
                ready.append(process.name)
        view = FleetView(
            time=self.wall(),
            ready=ready,
            states=states,
            units=fleet.orders,
            lost=sorted(fleet.lost),
            silent=silent,
            hung=fleet.hung,
            ending=self.ending,
            waits_for=self._waiting(),
            release=self._release(now),
            heartbeat_s=self.plan.heartbeat_s,
        )
        if now - self._told_at < self.plan.heartbeat_s and view == msgspec.structs.replace(self._told, time=view.time):
            return
        try:
            write_json(self.attempt.fleet_file, msgspec.to_builtins(view))
            self._told, self._told_at = view, now
        except OSError as error:
            if may_pass(error) or files.is_transient(error):
                raise
            self.journal.write(PublishFailed(str(error)))

    def _waiting(self) -> str:
        """What is wrong with the file system that the run waits for; an event tells of each change."""
        trouble = self.fleet.waits_for or self._records.trouble
        if bool(trouble) != bool(self._waits_for):
            self.journal.write(FileSystemFault(trouble))
        self._waits_for = trouble
        return trouble

    def _release(self, now: float) -> bool:
        """Whether engines and orchestrator may stop: no trainer needs them for a last checkpoint any more."""
        if self.ending is None:
            return False
        if self.ending.outcome is Outcome.COMPLETED:
            return True
        if self.ending.outcome is Outcome.CANCELLED and (self._cancelled_now() or self._all_saved()):
            return True
        checkpointing = self._all_run("trainer") and self._all_run("orchestrator", none=True)
        return not checkpointing or now - self._ending_at > self._grace_s

    def _cancelled_now(self) -> bool:
        """Whether the user wants no last checkpoint."""
        with contextlib.suppress(OSError):
            return files.read_text(self.attempt.cancel_file) == CANCEL_NOW
        return False

    def _all_saved(self) -> bool:
        """Whether a checkpoint has all that was trained. A trainer that still loads has trained nothing."""
        trainer = self.attempt.state("trainer-rank-0", TrainerState)
        if trainer is None or trainer.step is None:
            return True
        return trainer.step == (checkpoints.newest(self.run_directory.path) or 0)

    def _all_run(self, role: str, *, none: bool = False) -> bool:
        """Whether all processes of a role run; `none`: the answer if there are none."""
        reports = [self.fleet.report(p.name) for p in self.plan.processes() if p.role == role]
        running = (ProcessState.LOADING, ProcessState.READY)
        return all(r is not None and r.state in running for r in reports) if reports else none

    def _has_ended(self, rank: int, now: float) -> bool:
        fleet = self.fleet
        limit_s = self._timings.gather_silent * self.plan.heartbeat_s
        return fleet.agents[rank].ended or now - fleet.seen_at[rank] > limit_s

    def _gathered(self, now: float) -> bool:
        if self.ending is None:
            return False
        if all(self._has_ended(rank, now) for rank in self.fleet.agents):
            return True
        late = now - self._ending_at > self._grace_s + self._timings.gather_s
        return late or now > self._killed_at - RECORD_S
