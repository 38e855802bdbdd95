"""State machine of the whole run: node assignment, restarts across nodes, degradation after losses, and the end.

Pure: reports and a clock go in; orders, events and endings come out.

An attempt ends when the work is complete, when a process dies that cannot be replaced, when there is no progress, or on
request (preemption, time limit, cancellation). A spare of the same group replaces a lost node. Without a spare, the run
continues without the node's engines and routers as long as one replica still serves. The environment workers of a node
that has only such workers move to other nodes of its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from primeslurm.base.units import duration
from primeslurm.node.agent.supervision import ProcessState
from primeslurm.node.head.blame import Fault, fails_again, whose_fault
from primeslurm.node.head.failed_starts import FailedStarts
from primeslurm.node.head.node_assignment import NodeAssignment
from primeslurm.node.head.process_states import error_message, how_it_died
from primeslurm.node.head.restart_groups import RestartGroup, restart_groups_of
from primeslurm.node.head.unresponsive_ranks import THRESHOLDS, QuietThresholds, UnresponsiveRanks, unresponsive_ranks
from primeslurm.plan.model import Plan, Process, Replica
from primeslurm.records.events.nodes import (
    NodeLost,
    NodeReplaced,
    NodesAssigned,
    ProcessesGivenUp,
    ProcessesMoved,
    ProcessesRestarted,
)
from primeslurm.records.fleet import (
    AgentReport,
    Ending,
    HeartbeatReport,
    Outcome,
    PreflightState,
    ProcessReport,
    RestartOrder,
)
from primeslurm.records.record import Event
from primeslurm.run.diagnosis.failure_signatures import is_transient
from primeslurm.run.diagnosis.failures import FILE_SYSTEM
from primeslurm.wire import exit_codes

AGENT_ENDED = "its agent ended"  # reason for the loss of a node whose agent has ended without an error
SPARE_WAIT_S = 30.0  # longest wait for spares once every node of the Plan can be assigned
# Delay before the death of a trainer rank ends the attempt, if a spare is available: after this long, all nodes of the
# trainer must have sent a heartbeat. A failed GPU or node, which the spare would replace, may be noticed only then.
VERDICT_S = 5.0
# Time for trainer ranks to end after the orchestrator has ended [s].
RANKS_END_S = 60.0
# Lost nodes that the reason of an ending names.
_NAMED_LOSSES = 4
_DEAD = (ProcessState.BACKOFF, ProcessState.FALLEN, ProcessState.FAILED)
_EXPENDABLE = ("engine", "prefill", "decode", "router", "store")
_REPLACEABLE = (*_EXPENDABLE, "environment", "trainer", "teacher", "tinker")


@dataclass(frozen=True)
class News:
    """An event for the journal, and the name of the node to blame for the ledger of bad nodes."""

    event: Event
    blamed: str | None = None


@dataclass
class Fleet:
    """The head's view of the run. Feed it with the `observe` methods, then call `decide`."""

    plan: Plan
    started_at: float  # by the head's monotonic clock, as every `now`
    thresholds: QuietThresholds = THRESHOLDS
    hosts: Sequence[str] = ()  # node names by rank; empty if they are only known from reports
    agents: dict[int, AgentReport] = field(default_factory=dict)  # newest report by rank
    seen_at: dict[int, float] = field(default_factory=dict)  # arrival of the newest report by rank
    gone: dict[int, str] = field(default_factory=dict)  # ranks that this attempt has stopped using, and why
    lost: set[str] = field(default_factory=set)  # processes that were given up
    news: list[News] = field(default_factory=list)
    progress: Any = None
    progress_at: float = 0.0
    last_error: str = ""  # why the orchestrator ends, in its own words
    work_is_done: bool = False  # the orchestrator needs no trainer any more
    hung: dict[str, str] = field(default_factory=dict)  # unresponsive trainer ranks that must be ended, and why
    unresponsive_ranks: UnresponsiveRanks | None = None  # while no trainer rank sends heartbeats

    def __post_init__(self) -> None:
        self.assignment = NodeAssignment(self.plan)
        self.restart_groups: dict[str, RestartGroup] = restart_groups_of(self.plan)
        self._processes = {process.name: process for process in self.plan.processes()}
        self._failed_starts = FailedStarts(self._processes.values())
        self._enough_since: float | None = None
        self._exits: dict[str, str] = {}  # node names whose task has ended, and how
        self._killed: dict[str, str] = {}  # node names whose agent was killed, and how
        self._file_system_fault_at = self.started_at  # last time agents waited for the file system
        self._died_at: dict[str, float] = {}  # by restart group: first death of a member that is not restarted
        self._orchestrator_done_at: float | None = None

    def observe(self, report: AgentReport, now: float) -> None:
        """Record an agent's heartbeat.

        Its age counts from the first time that this head sees it, because the clocks of nodes differ.
        """
        before = self.agents.get(report.rank)
        if before is None or (before.number, before.agent_pid) != (report.number, report.agent_pid):
            self.seen_at[report.rank] = now
        self.agents[report.rank] = report

    def observe_progress(self, marker: Any, now: float) -> None:
        if marker != self.progress or not self.progress_at:
            self.progress, self.progress_at = marker, now

    def observe_exits(self, exits: Mapping[str, str], now: float) -> None:
        """Record nodes whose task has ended, and how. Without a heartbeat, the agent has never run."""
        self._exits = {**exits, **self._exits}
        for rank in self.unheard:
            name, peers = self._name(rank), self._peers(rank)
            # If it happened to all peers, no node is to blame. So this waits until every peer works or has failed.
            if name in self._exits and (self._works(peers) or all(self._name(peer) in self._exits for peer in peers)):
                why = f"no agent could be started: {self._exits[name]}"
                self._lose(rank, why, now, blame=self._works(peers))

    def observe_kills(self, kills: Mapping[str, str]) -> None:
        """Record nodes whose agent was killed, and how. They are lost without a timeout."""
        self._killed |= kills

    def excuse_unreadable(self, ranks: Collection[int], seconds: float) -> None:
        """Excuse agents whose heartbeats could not be read for this long."""
        self.seen_at = {rank: at + seconds * (rank in ranks) for rank, at in self.seen_at.items()}

    def excuse_all(self, seconds: float) -> None:
        """Excuse all agents: the head itself did not run for this long, or nobody could write."""
        self.seen_at = {rank: at + seconds for rank, at in self.seen_at.items()}
        self._died_at = {group: at + seconds for group, at in self._died_at.items()}

    @property
    def unheard(self) -> list[int]:
        return sorted(set(range(self.plan.allocated)) - set(self.agents) - set(self.gone))

    def agent_of(self, node: int) -> AgentReport | None:
        """Return the report of the agent that has taken over a Plan node."""
        report = self.agents.get(self.assignment.rank_of.get(node, -1))
        return report if report is not None and report.node == node else None

    def report(self, name: str) -> ProcessReport | None:
        agent = self.agent_of(self.assignment.home(self._processes[name]))
        return agent.processes.get(name) if agent else None

    def heartbeat_age(self, name: str, now: float) -> float:
        """Return the age of the last heartbeat of a process's agent [s]."""
        rank = self.assignment.rank_of.get(self.assignment.home(self._processes[name]), -1)
        return now - self.seen_at.get(rank, now)

    @property
    def assembled(self) -> bool:
        """True if agents have taken over all assigned nodes."""
        return bool(self.assignment.generation) and all(self.agent_of(node) for node in self.assignment.rank_of)

    @property
    def quiet(self) -> dict[str, HeartbeatReport]:
        """Processes without a heartbeat for a while. Of trainer ranks, only those that the others wait for."""
        quiet = {}
        for process in self._processes.values():
            report = self.report(process.name)
            if report is None or report.heartbeat is None:
                continue
            waited_for = self.unresponsive_ranks is not None and process.name in self.unresponsive_ranks.behind
            if waited_for if process.role == "trainer" else self.thresholds.exceeded(report.heartbeat):
                quiet[process.name] = report.heartbeat
        return quiet

    @property
    def orders(self) -> dict[str, RestartOrder]:
        return {name: group.order for name, group in self.restart_groups.items() if group.generation}

    @property
    def waits_for(self) -> str:
        """The fault of the shared file system that agents wait out; empty without one."""
        checking = (r for r in self.agents if r not in self.gone and self._checks(r))
        return next((text for rank in sorted(checking) if (text := self.agents[rank].file_system)), "")

    def decide(self, now: float) -> Ending | None:
        """Handle losses and deaths since the last call. Return why the attempt ends now, or None."""
        if self.waits_for:
            self._file_system_fault_at = now
        self._give_up_late_agents(now)
        if not self.assignment.generation:
            return self._lose_unfit_nodes(now) or self._assign_nodes(now)
        self._find_unresponsive_ranks()
        return (
            self._complete(now)
            or self._lose_unfit_nodes(now)
            or self._lose_silent_nodes(now)
            or self._failed_starts.check(self.report, self.lost)
            or self._restart_groups(now)
            or self._handle_dead_processes(now)
            or self._stalled(now)
        )

    # nodes

    def _fit(self) -> set[int]:
        return {r for r, agent in self.agents.items() if agent.fitness is PreflightState.FIT and r not in self.gone}

    def _checks(self, rank: int) -> bool:
        return rank not in self.agents or self.agents[rank].fitness is PreflightState.CHECKING

    def _assign_nodes(self, now: float) -> Ending | None:
        if self.assignment.lacks_agents(self.gone):
            return Ending(Outcome.FAILED, _folded([*self.gone.values()]), self._name(next(iter(self.gone))))
        undecided = sorted(set(range(self.plan.allocated)) - self._fit() - set(self.gone))
        if self._enough_since is None and NodeAssignment(self.plan).fill(self._fit()):
            self._enough_since = now
        waited_for_spares = self._enough_since is not None and now - self._enough_since > SPARE_WAIT_S
        if undecided and not self._late(now) and not waited_for_spares:
            return None
        if not self.assignment.fill(self._fit()):
            names = [self._name(rank) for rank in undecided]
            limit = duration(self.plan.node_start_s)
            reason = _folded([f"node {name}: its preflight has not ended within {limit}" for name in names])
            return Ending(Outcome.FAILED, reason, names[0])
        if ending := self._same_address():
            return ending
        spares = sorted(self.agents[rank].name for rank in self._fit() if self.assignment.node_of(rank) is None)
        nodes = [self.agents[rank].name for _, rank in sorted(self.assignment.rank_of.items())]
        self.news.append(News(NodesAssigned(nodes, spares)))
        return None

    def _same_address(self) -> Ending | None:
        """End the attempt if two nodes report one address, for example that of a bridge that exists on every node."""
        if self.plan.executor != "slurm":
            return None
        names: dict[str, str] = {}
        for rank in sorted(self._fit()):
            agent = self.agents[rank]
            other = names.setdefault(agent.address, agent.name)
            if other != agent.name:
                reason = f"nodes {other} and {agent.name} both have the address {agent.address}: set network.interface"
                return Ending(Outcome.FAILED, f"{reason} or network.addresses in the site file", "network", final=True)
        return None

    def _lose_unfit_nodes(self, now: float) -> Ending | None:
        for rank, agent in sorted(self.agents.items()):
            if rank in self.gone:
                continue
            if agent.environments_fail and not self._environments_load(rank):
                ending = self._environments_fail(rank, agent)
            elif agent.fitness is PreflightState.UNFIT:
                ending = self._judge_unfit(rank, agent, now)
            elif agent.error:
                ending = self._lose(rank, agent.error, now)
            elif agent.ended:
                ending = self._lose(rank, AGENT_ENDED, now, blame=False)
            else:
                continue
            if ending:
                return ending
        return None

    def _judge_unfit(self, rank: int, agent: AgentReport, now: float) -> Ending | None:
        used = set(range(self.plan.allocated)) - set(self.gone)
        kind = used & self._same_kind(rank)
        match whose_fault(rank, self.agents, kind, used):
            case Fault.NODE:
                # A program that has a fixed port ends some time, and other runs may use the node.
                return self._lose(rank, agent.unfit_because, now, blame=set(agent.failed) != {"ports"})
            case Fault.FILE_SYSTEM:
                reason = f"the shared file system, seen from {agent.name}: {agent.unfit_because}"
                return Ending(Outcome.FAILED, reason, FILE_SYSTEM)
            case Fault.ALIKE:
                why = agent.unfit_because
                alike = f"all {len(kind)} nodes of its kind fail alike, so none is excluded"
                if len(kind) == 1:
                    alike = f"all {len(used)} nodes of the job fail alike, so none is excluded"
                if len(used) == 1:
                    alike = "the job has no other node to compare it with, so it is not excluded"
                reason = f"preflight failed on {agent.name}: {why} ({alike})"
                return Ending(Outcome.FAILED, reason, "all nodes alike", final=fails_again(agent), error=why)
            case Fault.OPEN:
                return None

    def _late(self, now: float) -> bool:
        return now - self._file_system_fault_at > self.plan.node_start_s

    def _same_kind(self, rank: int) -> set[int]:
        return set(self.plan.ranks(self.plan.group_of_rank(rank).index))

    def _environments_load(self, rank: int) -> bool:
        peers = [self.agents[peer] for peer in self._same_kind(rank) & set(self.agents)]
        return any(peer.fitness is PreflightState.FIT and not peer.checks_environments for peer in peers)

    def _environments_fail(self, rank: int, agent: AgentReport) -> Ending | None:
        """End the attempt if the environments load on no node. Then no node is to blame."""
        peers = self._same_kind(rank) - set(self.gone)
        if any(self._checks(peer) or self.agents[peer].checks_environments for peer in peers):
            return None
        reason = f"environments do not load on node {agent.name}: {agent.environments_fail}"
        return Ending(Outcome.FAILED, reason, "environments", final=True)

    def _give_up_late_agents(self, now: float) -> None:
        """Lose agents that were killed before the assignment or their first report, or have not reported in time."""
        unassigned = self.unheard if self.assignment.generation else set(range(self.plan.allocated)) - set(self.gone)
        for rank in sorted(unassigned):
            if how := self._killed.get(self._name(rank)):
                blame = rank in self.agents or self._works(self._peers(rank))
                self._lose(rank, f"its agent was killed: {how}", now, blame=blame)
        if self._late(now):
            for rank in self.unheard:
                why = f"no sign of its agent within {duration(self.plan.node_start_s)}"
                self._lose(rank, why, now, blame=self._works(self._peers(rank)))

    def _peers(self, rank: int) -> set[int]:
        """Return the other nodes of its kind. If there are none: all other nodes except the head's."""
        kind = self._same_kind(rank)
        return (kind if len(kind) > 1 else set(range(1, self.plan.allocated))) - {rank}

    def _works(self, peers: set[int]) -> bool:
        return not peers or not peers.isdisjoint(self.agents)

    def _lose_silent_nodes(self, now: float) -> Ending | None:
        for rank in sorted(set(self.seen_at) - set(self.gone)):
            silent_s, how = now - self.seen_at[rank], self._killed.get(self._name(rank))
            if how is None and silent_s <= self.plan.node_silent_s:
                continue
            why = f"its agent was killed: {how}" if how else f"has been silent for {silent_s:.0f} s"
            if ending := self._lose(rank, why, now):
                return ending
        return None

    def _name(self, rank: int) -> str:
        if rank in self.agents:
            return self.agents[rank].name
        return self.hosts[rank] if rank < len(self.hosts) else f"rank {rank}"

    def _lose(self, rank: int, why: str, now: float, *, blame: bool = True) -> Ending | None:
        """Continue without an agent: replace its node by a spare, move or give up its processes, or end the attempt."""
        name = self._name(rank)
        reason = f"node {name}: {why}"
        self.gone[rank] = reason
        self.news.append(News(NodeLost(name, rank, why), name if blame else None))
        node = self.assignment.node_of(rank)
        if node is None:
            return None
        processes = [process for process in self._processes.values() if self.assignment.home(process) == node]
        if not all(process.role in _REPLACEABLE for process in processes):
            return Ending(Outcome.FAILED, reason, name)
        spare = self.assignment.replace(node, self._fit())
        if spare is None and (others := self._other_environment_nodes(node)):
            to = [self._name(self.assignment.rank_of[n]) for n in self.assignment.disperse(node, processes, others)]
            self.news.append(News(ProcessesMoved(name, [process.name for process in processes], to)))
            return None
        if spare is None:
            self.assignment.vacate(node)
            return self._give_up((process.name for process in processes), reason, name)
        self.news.append(News(NodeReplaced(name, self.agents[spare].name, node)))
        for group in {process.restart_group for process in processes if process.restart_group is not None}:
            self._restart_group(self.restart_groups[group], f"node {name} is lost", now)
        return None

    def _other_environment_nodes(self, node: int) -> list[int]:
        if self.plan.nodes[node].role != "environments":
            return []
        kind = [other.index for other in self.plan.nodes if other.role == "environments" and other.index != node]
        return [other for other in kind if other in self.assignment.rank_of]

    # processes

    def _give_up(self, names: Iterable[str], reason: str, suspect: str, error: str = "") -> Ending | None:
        """Continue without some processes and everything that depends on them, if a replica still serves."""
        lost = self.lost | set(names)
        for group in self.restart_groups.values():
            members = {process.name for process in group.members}
            lost |= members if members & lost else set()
        serving = [replica for replica in self.plan.replicas if self._serves(replica, lost)]
        for replica in self.plan.replicas:
            if replica not in serving:
                lost |= {replica.router, *replica.engines}
        if not serving or not self._expendable(lost):
            return Ending(Outcome.FAILED, reason, suspect, error=error)
        self.news.append(News(ProcessesGivenUp(sorted(lost - self.lost), reason)))
        self.lost = lost
        return None

    def _serves(self, replica: Replica, lost: set[str]) -> bool:
        # With prefill and decode engines, one of each is enough.
        left = {self._processes[name].role for name in replica.engines if name not in lost}
        return replica.router not in lost and left == {self._processes[name].role for name in replica.engines}

    def _expendable(self, lost: set[str]) -> bool:
        # A remaining process may need a store, for example each client needs the store's master.
        stores = {name for name in lost if self._processes[name].role == "store"}
        needed = any(stores & set(p.after) for p in self._processes.values() if p.name not in lost)
        return not needed and all(self._processes[name].role in _EXPENDABLE for name in lost)

    def _restart_groups(self, now: float) -> Ending | None:
        assembled = self.assembled  # looks at every node, so it is computed once and not per group
        for group in self.restart_groups.values():
            if any(process.name in self.lost for process in group.members):
                continue
            reports = {process.name: self.report(process.name) for process in group.members}
            if (dead := group.dead_member(reports)) is not None:
                report = reports[dead.name]
                assert report is not None
                reason = f"{dead.name} {how_it_died(report)}"
                if group.exhausted:
                    reason += f"; its restart group {group.name} was restarted {group.restarts} times"
                    if ending := self._give_up([dead.name], reason, group.name, error_message(report)):
                        return ending
                    continue
                self._restart_group(group, reason, now)
            # Wait until all agents have taken over their nodes. Else members would start with a lost node's address.
            if assembled:
                group.tick(now, reports)
        return None

    def _restart_group(self, group: RestartGroup, reason: str, now: float) -> None:
        group.restart(now)
        self._died_at.pop(group.name, None)
        self.news.append(News(ProcessesRestarted(group.name, group.generation, reason)))

    def _find_unresponsive_ranks(self) -> None:
        # Agents cannot do this: ranks wait for one another, so that one unresponsive rank silences all of them.
        heartbeats = self._heartbeats_of_ranks()
        before, self.unresponsive_ranks = self.unresponsive_ranks, unresponsive_ranks(heartbeats, self.thresholds)
        if self.unresponsive_ranks is None:
            # Without heartbeats of all ranks, some have just died because the unresponsive ones were ended. The list is
            # kept, because `_handle_dead_processes` must blame the right rank.
            self.hung = {} if heartbeats else self.hung
            return
        if before is None or before.behind != self.unresponsive_ranks.behind:
            self.news.append(News(self.unresponsive_ranks.event()))
        if self.unresponsive_ranks.timed_out and not self.hung:
            self.hung = dict.fromkeys(self.unresponsive_ranks.behind, self.unresponsive_ranks.reason)

    def _heartbeats_of_ranks(self) -> dict[str, HeartbeatReport]:
        """Return the heartbeats of all trainer ranks; nothing if one of them does not run."""
        ranks = [process.name for process in self._processes.values() if process.role == "trainer"]
        reports = [self.report(name) for name in ranks]
        heartbeats = [each.heartbeat if each and each.state == ProcessState.READY else None for each in reports]
        if not all(heartbeats):
            return {}
        return {name: heartbeat for name, heartbeat in zip(ranks, heartbeats, strict=True) if heartbeat}

    def _handle_dead_processes(self, now: float) -> Ending | None:
        # When one rank dies, the others die with connection errors in the same moment. The cause is named first: ranks
        # that were ended as unresponsive, then processes with an error of their own.
        def order(process: Process) -> tuple[bool, bool]:
            report = self.report(process.name)
            error = error_message(report) if report is not None else ""
            return process.name not in self.hung, not error or is_transient(error)

        for process in sorted(self.plan.processes(), key=order):
            report = self.report(process.name)
            if report is None or report.state != ProcessState.FAILED or process.name in self.lost:
                continue
            group = self.restart_groups.get(process.restart_group or "")
            if group is not None and report.generation < group.generation:
                continue  # it is about to restart
            if process.role == "trainer" and self.work_is_done:
                continue  # everything is saved; NCCL, for example, may crash at exit
            reason = f"{process.name} {how_it_died(report)}"
            if report.exit_code == exit_codes.CHECKPOINTED:
                return Ending(Outcome.PREEMPTED, f"{process.name} checkpointed and stopped", process.name)
            if report.exit_code == exit_codes.STALLED:
                reason = self.last_error or f"{process.name} saw no progress: see its events"
                return Ending(Outcome.FAILED, reason, process.name)
            if report.exit_code == exit_codes.UNRECOVERABLE:
                reason = self.last_error or (reason if report.reason else f"{reason}: see its events")
                return Ending(Outcome.FAILED, reason, process.name, final=True)
            if group is not None and self._may_miss_a_node(group, now):
                continue
            error = "" if process.name in self.hung else error_message(report)
            if ending := self._give_up([process.name], reason, process.name, error):
                return ending
        return None

    def _may_miss_a_node(self, group: RestartGroup, now: float) -> bool:
        """Return whether a process may have died because a node of its group failed, which a spare can replace."""
        died_at = self._died_at.setdefault(group.name, now)
        return any(
            self.seen_at[self.assignment.rank_of[process.node]] <= died_at + VERDICT_S
            and self.assignment.spare(process.node, self._fit()) is not None
            for process in group.members
        )

    def _complete(self, now: float) -> Ending | None:
        """Complete the attempt if the orchestrator and all trainer ranks have ended.

        An orchestrator that has ended answers no rank, so the other ranks must end soon. If it said that the work is
        done, which it does after the last commit, ranks that have died are not needed either.
        """
        states: dict[str, list[ProcessState | None]] = {"trainer": [], "orchestrator": []}
        for process in self.plan.processes():
            if process.role in states:
                report = self.report(process.name)
                states[process.role].append(ProcessState(report.state) if report else None)
        orchestrators, ranks = states["orchestrator"], states["trainer"]
        if not orchestrators + ranks or any(state is not ProcessState.DONE for state in orchestrators):
            return None
        unfinished = [state for state in ranks if state is not ProcessState.DONE]
        if unfinished:
            if not orchestrators or (ProcessState.FAILED in unfinished and not self.work_is_done):
                return None
            if self._orchestrator_done_at is None:
                self._orchestrator_done_at = now
            needed = not self.work_is_done or any(state not in _DEAD for state in unfinished)
            if needed and now - self._orchestrator_done_at <= RANKS_END_S:
                return None
        return Ending(Outcome.COMPLETED, "all steps done")

    def _stalled(self, now: float) -> Ending | None:
        limit = self.plan.stall_timeout_s * 1.5  # the orchestrator's timeout is shorter, and it knows the reason
        if self.progress_at and now - self.progress_at > limit:
            return Ending(Outcome.FAILED, f"no progress for {duration(now - self.progress_at)}", "orchestrator")
        return None


def _folded(reasons: Sequence[str]) -> str:
    """Join the reasons of the first lost nodes, and count the others. Each node has an event of its own."""
    text = "; ".join(reasons[:_NAMED_LOSSES])
    return text if len(reasons) <= _NAMED_LOSSES else f"{text}; and {len(reasons) - _NAMED_LOSSES} nodes more"
