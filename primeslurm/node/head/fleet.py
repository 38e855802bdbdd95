"""The state of the whole run as its head sees it: who plays which node, what goes on without a loss, and the end.

Pure: reports and a clock in; orders, news and endings out.

An attempt ends when the work is complete, when something dies that nothing replaces, when nothing makes progress, or
when it is told to (preemption, time limit, cancel). A node that is lost is replaced by a spare of its group; without
one, the engines and routers on it are given up as long as some replica still serves, and the environment workers of a
node that has nothing else move to others of its kind.
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
from primeslurm.node.head.process_states import how_it_died, message
from primeslurm.node.head.restart_groups import RestartGroup, restart_groups_of
from primeslurm.node.head.unresponsive_ranks import PATIENCE, Patience, UnresponsiveRanks, unresponsive_ranks
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

AGENT_ENDED = "its agent ended"
"""Why a node is lost whose agent has ended by itself, without an error."""
SPARE_WAIT_S = 30.0
"""Longest wait for the rest once there are enough fit nodes."""
VERDICT_S = 5.0
"""With a spare at hand, the death of one of the trainer's ranks ends the attempt only if all of their nodes were heard
of so much later: it takes a moment to find that a GPU has failed."""
_TOLD = 4
"""Lost nodes that are named where an attempt ends for them."""
_EXPENDABLE = ("engine", "prefill", "decode", "router", "store")
_REPLACEABLE = (*_EXPENDABLE, "environment", "trainer", "teacher")


@dataclass(frozen=True)
class News:
    """Something that happened, for the journal."""

    event: Event
    blamed: str | None = None
    """Name of a node that is to blame, for the bad-node ledger."""


@dataclass
class Fleet:
    """The head's view. Feed it heartbeats with `observe`, then ask `decide`."""

    plan: Plan
    started_at: float
    """By the monotonic clock of the head, as every `now`."""
    patience: Patience = PATIENCE
    """With processes that say nothing."""
    hosts: Sequence[str] = ()
    """Names of the job's nodes, by rank; empty where nobody knows them before their agents report."""
    agents: dict[int, AgentReport] = field(default_factory=dict)
    """By rank."""
    seen_at: dict[int, float] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks that are not used any more in this attempt, and why."""
    lost: set[str] = field(default_factory=set)
    """Processes that were given up."""
    news: list[News] = field(default_factory=list)
    progress: Any = None
    progress_at: float = 0.0
    last_words: str = ""
    """Why the orchestrator ends, in its own words."""
    hung: dict[str, str] = field(default_factory=dict)
    """Trainer ranks that have to be ended, and why."""
    unresponsive_ranks: UnresponsiveRanks | None = None
    """Of the trainer's ranks, as long as it lasts."""

    def __post_init__(self) -> None:
        self.assignment = NodeAssignment(self.plan)
        self.restart_groups: dict[str, RestartGroup] = restart_groups_of(self.plan)
        self._processes = {process.name: process for process in self.plan.processes()}
        self._failed_starts = FailedStarts(self._processes.values())
        self._enough_since: float | None = None
        self._exits: dict[str, str] = {}
        """Names of nodes whose task has ended, and how."""
        self._killed: dict[str, str] = {}
        """Names of nodes whose agent was killed, and how."""
        self._waited_until = self.started_at
        """When a fault of the file system was last waited for, which nobody is late for."""
        self._died_at: dict[str, float] = {}
        """By restart group: when the first of its processes was seen to have ended for good."""

    def observe(self, report: AgentReport, now: float) -> None:
        """Take in a heartbeat. Freshness counts from when its content last changed, by this head's own clock."""
        known = self.agents.get(report.rank)
        if known is None or (known.number, known.agent_pid) != (report.number, report.agent_pid):
            self.seen_at[report.rank] = now
        self.agents[report.rank] = report

    def observe_progress(self, marker: Any, now: float) -> None:
        """Take in a value that changes whenever the run gets on (finished rollouts, version, step)."""
        if marker != self.progress or not self.progress_at:
            self.progress, self.progress_at = marker, now

    def observe_exits(self, exit_codes: Mapping[str, str], now: float) -> None:
        """Take in nodes whose task has ended, and how: without a heartbeat, its agent has never run.

        No node is to blame if this happened to all of its peers. Until that is known, nothing is decided.
        """
        self._exits = {**exit_codes, **self._exits}
        for rank in self.unheard:
            name, peers = self._name(rank), self._peers(rank)
            if name in self._exits and (self._works(peers) or all(self._name(peer) in self._exits for peer in peers)):
                why = f"no agent could be started: {self._exits[name]}"
                self._lose(rank, why, now, blame=self._works(peers))

    def observe_kills(self, kills: Mapping[str, str]) -> None:
        """Take in nodes whose agent was killed, and how: nobody has to wait until it has been silent for long."""
        self._killed |= kills

    def unreadable(self, ranks: Collection[int], seconds: float) -> None:
        """Take in that the heartbeats of some agents could not be read for so long."""
        self.seen_at = {rank: at + seconds * (rank in ranks) for rank, at in self.seen_at.items()}

    def held_up(self, seconds: float) -> None:
        """Take in that the head itself was held up: for so long nobody could have been heard of."""
        self.seen_at = {rank: at + seconds for rank, at in self.seen_at.items()}
        self._died_at = {group: at + seconds for group, at in self._died_at.items()}

    @property
    def unheard(self) -> list[int]:
        """Ranks whose agents have not reported yet."""
        return sorted(set(range(self.plan.allocated)) - set(self.agents) - set(self.gone))

    def agent_of(self, node: int) -> AgentReport | None:
        """Return the heartbeat of the agent that plays a node, once it does."""
        report = self.agents.get(self.assignment.rank_of.get(node, -1))
        return report if report is not None and report.node == node else None

    def report(self, name: str) -> ProcessReport | None:
        """Tell what is known of one process."""
        agent = self.agent_of(self.assignment.home(self._processes[name]))
        return agent.processes.get(name) if agent else None

    def silence(self, name: str, now: float) -> float:
        """Tell how many seconds ago the agent of a process was heard of."""
        rank = self.assignment.rank_of.get(self.assignment.home(self._processes[name]), -1)
        return now - self.seen_at.get(rank, now)

    @property
    def assembled(self) -> bool:
        """Whether every node is played by an agent that has taken its place."""
        return bool(self.assignment.generation) and all(self.agent_of(node) for node in self.assignment.rank_of)

    @property
    def silent(self) -> dict[str, HeartbeatReport]:
        """Processes that have been silent for a while; of the trainer's ranks those that the others wait for."""
        found = {}
        for process in self._processes.values():
            report = self.report(process.name)
            if report is None or report.heartbeat is None:
                continue
            waited_for = self.unresponsive_ranks is not None and process.name in self.unresponsive_ranks.behind
            if waited_for if process.role == "trainer" else self.patience.is_over(report.heartbeat):
                found[process.name] = report.heartbeat
        return found

    @property
    def orders(self) -> dict[str, RestartOrder]:
        """What agents have to know of restart groups."""
        return {name: group.order for name, group in self.restart_groups.items() if group.generation}

    @property
    def waits_for(self) -> str:
        """What is wrong with the shared file system, as long as agents wait for that to be over; empty otherwise."""
        waiting = (
            a for r, a in sorted(self.agents.items()) if r not in self.gone and a.fitness is PreflightState.CHECKING
        )
        return next((agent.file_system for agent in waiting if agent.file_system), "")

    def decide(self, now: float) -> Ending | None:
        """Replace, restart and give up what must be; the reason to end the attempt now, or None."""
        if self.waits_for:
            self._waited_until = now
        self._give_up_waiting(now)
        if not self.assignment.generation:
            return self._unfit(now) or self._assign_nodes(now)
        self._look_at_ranks()
        return (
            self._unfit(now)
            or self._missing(now)
            or self._failed_starts.look(self.report, self.lost)
            or self._restart_groups(now)
            or self._dead_process(now)
            or self._complete()
            or self._stalled(now)
        )

    # nodes

    def _fit(self) -> set[int]:
        return {r for r, agent in self.agents.items() if agent.fitness is PreflightState.FIT and r not in self.gone}

    def _assign_nodes(self, now: float) -> Ending | None:
        if self.assignment.short(self.gone):
            return Ending(Outcome.FAILED, _folded([*self.gone.values()]), self._name(next(iter(self.gone))))
        undecided = sorted(set(range(self.plan.allocated)) - self._fit() - set(self.gone))
        late = self._late(now)
        if self._enough_since is None and NodeAssignment(self.plan).fill(self._fit()):
            self._enough_since = now
        patient = self._enough_since is not None and now - self._enough_since > SPARE_WAIT_S
        if undecided and not late and not patient:
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
        """Return why the attempt ends if two nodes have one address, such as that of a bridge which every node has."""
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

    def _unfit(self, now: float) -> Ending | None:
        """Agents that failed their preflight, or failed themselves."""
        for rank, agent in sorted(self.agents.items()):
            if rank in self.gone:
                continue
            if agent.environments_fail and not self._environments_load(rank):
                ending = self._environments_fail(rank, agent)
            elif agent.fitness is PreflightState.UNFIT:
                ending = self._lose_unfit(rank, agent, now)
            elif agent.error:
                ending = self._lose(rank, agent.error, now)
            elif agent.ended:
                ending = self._lose(rank, AGENT_ENDED, now, blame=False)
            else:
                continue
            if ending:
                return ending
        return None

    def _lose_unfit(self, rank: int, agent: AgentReport, now: float) -> Ending | None:
        """Only a node that is at fault itself is done without."""
        used = set(range(self.plan.allocated)) - set(self.gone)
        kind = used & set(self.plan.ranks(self.plan.group_of_rank(rank).index))
        match whose_fault(rank, self.agents, kind, used):
            case Fault.NODE:
                return self._lose(rank, agent.unfit_because, now)
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
        """Whether every agent should have been heard of by now."""
        return now - self._waited_until > self.plan.node_start_s

    def _environments_load(self, rank: int) -> bool:
        """Whether environments load on another node of an agent's group."""
        peers = self.plan.ranks(self.plan.group_of_rank(rank).index)
        return any(self.agents[peer].fitness is PreflightState.FIT for peer in peers if peer in self.agents)

    def _environments_fail(self, rank: int, agent: AgentReport) -> Ending | None:
        """Where they load nowhere, no node is to blame. Until all that may run them have tried, nobody knows."""
        peers = set(self.plan.ranks(self.plan.group_of_rank(rank).index)) - set(self.gone)
        if any(peer not in self.agents or self.agents[peer].fitness is PreflightState.CHECKING for peer in peers):
            return None
        reason = f"environments do not load on node {agent.name}: {agent.environments_fail}"
        return Ending(Outcome.FAILED, reason, "environments", final=True)

    def _give_up_waiting(self, now: float) -> None:
        """Agents that have never reported, whether they are needed or not, and those killed before they have a part."""
        if not self.assignment.generation:
            for rank in sorted(set(self.agents) - set(self.gone)):
                if how := self._killed.get(self._name(rank)):
                    self._lose(rank, f"its agent was killed: {how}", now)
        if self._late(now):
            for rank in self.unheard:
                why = f"no sign of its agent within {duration(self.plan.node_start_s)}"
                self._lose(rank, why, now, blame=self._works(self._peers(rank)))

    def _peers(self, rank: int) -> set[int]:
        """Return the other nodes of its kind; if there are none, all other nodes but the head."""
        kind = set(self.plan.ranks(self.plan.group_of_rank(rank).index))
        return (kind if len(kind) > 1 else set(range(1, self.plan.allocated))) - {rank}

    def _works(self, peers: set[int]) -> bool:
        """Whether an agent could be started on one of these nodes, or nobody knows because there are none."""
        return not peers or not peers.isdisjoint(self.agents)

    def _missing(self, now: float) -> Ending | None:
        for rank in sorted(set(self.seen_at) - set(self.gone)):
            silence, how = now - self.seen_at[rank], self._killed.get(self._name(rank))
            if how is None and silence <= self.plan.node_silent_s:
                continue
            why = f"its agent was killed: {how}" if how else f"has been silent for {silence:.0f} s"
            if ending := self._lose(rank, why, now):
                return ending
        return None

    def _name(self, rank: int) -> str:
        if rank in self.agents:
            return self.agents[rank].name
        return self.hosts[rank] if rank < len(self.hosts) else f"rank {rank}"

    def _lose(self, rank: int, why: str, now: float, *, blame: bool = True) -> Ending | None:
        """Do without an agent: a spare takes its place, or what ran there is given up, or the attempt ends."""
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
        for group in {process.unit for process in processes if process.unit is not None}:
            self._restart_group(self.restart_groups[group], f"node {name} is lost", now)
        return None

    def _other_environment_nodes(self, node: int) -> list[int]:
        """The nodes that can run what a node for environments ran; none for a node of another kind."""
        if self.plan.nodes[node].role != "environments":
            return []
        kind = [other.index for other in self.plan.nodes if other.role == "environments" and other.index != node]
        return [other for other in kind if other in self.assignment.rank_of]

    # processes

    def _give_up(self, names: Iterable[str], reason: str, suspect: str, error: str = "") -> Ending | None:
        """Go on without some processes if any replica still serves; whoever depends on them is given up as well."""
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
        left = {self._processes[name].role for name in replica.engines if name not in lost}
        return replica.router not in lost and left == {self._processes[name].role for name in replica.engines}

    def _expendable(self, lost: set[str]) -> bool:
        """Whether the run can do without all of these: a store must not be needed by what is left."""
        stores = {name for name in lost if self._processes[name].role == "store"}
        needed = any(stores & set(p.after) for p in self._processes.values() if p.name not in lost)
        return not needed and all(self._processes[name].role in _EXPENDABLE for name in lost)

    def _restart_groups(self, now: float) -> Ending | None:
        assembled = self.assembled  # looks at every node: not once for each group
        for group in self.restart_groups.values():
            if any(process.name in self.lost for process in group.members):
                continue
            reports = {process.name: self.report(process.name) for process in group.members}
            fallen = group.fell(reports)
            if fallen is not None:
                report = reports[fallen.name]
                assert report is not None
                reason = f"{fallen.name} {how_it_died(report)}"
                if group.exhausted:
                    reason += f"; its unit {group.name} was restarted {group.restarts} times"
                    if ending := self._give_up([fallen.name], reason, group.name, message(report)):
                        return ending
                    continue
                self._restart_group(group, reason, now)
            if assembled:  # or members would start with the address of a node that is being replaced
                group.tick(now, reports)
        return None

    def _restart_group(self, group: RestartGroup, reason: str, now: float) -> None:
        group.restart(now)
        self._died_at.pop(group.name, None)
        self.news.append(News(ProcessesRestarted(group.name, group.generation, reason)))

    def _look_at_ranks(self) -> None:
        """Find those that hang: ranks wait for one another, so that their agents cannot tell."""
        heartbeats = self._beats_of_ranks()
        known, self.unresponsive_ranks = self.unresponsive_ranks, unresponsive_ranks(heartbeats, self.patience)
        if self.unresponsive_ranks is None:
            self.hung = {} if heartbeats else self.hung  # kept while the others die of the end of those that hung
            return
        if known is None or known.behind != self.unresponsive_ranks.behind:
            self.news.append(News(self.unresponsive_ranks.event()))
        if self.unresponsive_ranks.hangs and not self.hung:
            self.hung = dict.fromkeys(self.unresponsive_ranks.behind, self.unresponsive_ranks.reason)

    def _beats_of_ranks(self) -> dict[str, HeartbeatReport]:
        """Of all ranks of the trainer; none if one of them does not run."""
        ranks = [process.name for process in self._processes.values() if process.role == "trainer"]
        reports = [self.report(name) for name in ranks]
        heartbeats = [report.heartbeat if report and report.state == ProcessState.READY else None for report in reports]
        return (
            {name: heartbeat for name, heartbeat in zip(ranks, heartbeats, strict=True) if heartbeat}
            if all(heartbeats)
            else {}
        )

    def _dead_process(self, now: float) -> Ending | None:
        # Those that hung first: the others died of their end. Then those with an error of their own, as ranks that lose
        # another rank die at the same moment.
        def order(process: Process) -> tuple[bool, bool]:
            report = self.report(process.name)
            error = message(report) if report is not None else ""
            return process.name not in self.hung, not error or is_transient(error)

        for process in sorted(self.plan.processes(), key=order):
            report = self.report(process.name)
            if report is None or report.state != ProcessState.FAILED or process.name in self.lost:
                continue
            group = self.restart_groups.get(process.unit or "")
            if group is not None and report.generation < group.generation:
                continue  # it is about to be started again
            reason = f"{process.name} {how_it_died(report)}"
            if report.exit_code == exit_codes.CHECKPOINTED:
                return Ending(Outcome.PREEMPTED, f"{process.name} checkpointed and stopped", process.name)
            if report.exit_code == exit_codes.STALLED:
                reason = self.last_words or f"{process.name} saw no progress: see its events"
                return Ending(Outcome.FAILED, reason, process.name)
            if report.exit_code == exit_codes.UNRECOVERABLE:
                words = self.last_words or (reason if report.reason else f"{reason}: see its events")
                return Ending(Outcome.FAILED, words, process.name, final=True)
            if group is not None and self._may_miss_a_node(group, now):
                continue
            error = "" if process.name in self.hung else message(report)
            if ending := self._give_up([process.name], reason, process.name, error):
                return ending
        return None

    def _may_miss_a_node(self, group: RestartGroup, now: float) -> bool:
        """Whether a process may have died of a node of its group that is gone or broken, and can be replaced."""
        died_at = self._died_at.setdefault(group.name, now)
        return any(
            self.seen_at[self.assignment.rank_of[process.node]] <= died_at + VERDICT_S
            and self.assignment.spare(process.node, self._fit()) is not None
            for process in group.members
        )

    def _complete(self) -> Ending | None:
        last: tuple[Process, ...] = tuple(p for p in self.plan.processes() if p.role in ("trainer", "orchestrator"))
        reports = [self.report(process.name) for process in last]
        if reports and all(report is not None and report.state == ProcessState.DONE for report in reports):
            return Ending(Outcome.COMPLETED, "all steps done")
        return None

    def _stalled(self, now: float) -> Ending | None:
        limit = self.plan.stall_timeout_s * 1.5  # the orchestrator looks first, and knows more
        if self.progress_at and now - self.progress_at > limit:
            return Ending(Outcome.FAILED, f"no progress for {duration(now - self.progress_at)}", "orchestrator")
        return None


def _folded(reasons: Sequence[str]) -> str:
    """Name a few of the lost nodes and why, and say how many more there are: each has an event of its own."""
    told = "; ".join(reasons[:_TOLD])
    return told if len(reasons) <= _TOLD else f"{told}; and {len(reasons) - _TOLD} nodes more"
