"""Slurm's command-line tools, typed: what is there, what a job does, and a few orders."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from primeslurm.errors import ClusterError
from primeslurm.hostlists import compress, expand

TIMEOUT_S = 60.0
"""For the answer to a command, in seconds."""
KILL_WAIT_S = 30.0
"""Slurm's default for KillWait, in seconds."""
_ENDED = frozenset(
    [
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ]
)


@dataclass(frozen=True)
class Partition:
    """A partition and how many of its nodes are free."""

    name: str
    up: bool
    nodes: int
    usable: int
    """Nodes that are idle or working: not down, drained or in maintenance."""
    idle: int
    cpus_per_node: int
    """The smallest number, where nodes differ."""
    gres: str
    """As Slurm prints it, for example gpu:8; empty for none."""


@dataclass(frozen=True)
class NodeState:
    """A node."""

    name: str
    state: str
    """Slurm's short word: idle, alloc, mix, down, drain ..."""
    responding: bool
    """False while the controller waits to hear from the node's daemon."""
    reason: str


@dataclass(frozen=True)
class JobComponent:
    """One component of a job; a job that is not heterogeneous has one."""

    job_id: str
    offset: int
    partition: str
    state: str
    nodes: str
    """Host list in Slurm's notation, empty while pending."""


@dataclass(frozen=True)
class JobState:
    """A job. `source` is sacct when the controller has forgotten it."""

    job_id: str
    state: str
    """Of the leading component, for example PENDING."""
    reason: str
    """Why it waits or ended; empty for none."""
    restarts: int
    start: str
    """Start, or expected start of a waiting job; ISO time, or Unknown."""
    exit_code: int | None
    components: tuple[JobComponent, ...]
    source: Literal["scontrol", "sacct"]
    size: int = 1
    """Components that it was submitted with; Slurm forgets those that ended some minutes ago."""
    preempted_at: float | None = None
    """When Slurm began to preempt it, in Unix seconds; None if it did not."""
    ends_at: float | None = None
    """When Slurm ends it: at its time limit, or after the grace time of a preemption. Unix seconds; None: unknown."""

    @property
    def active(self) -> bool:
        """Whether it runs or may still run."""
        return self.state not in _ENDED

    @property
    def broken_up(self) -> bool:
        """Whether its leading component goes on, or waits, and others have ended.

        Slurm requeues that component alone if it has a single node left when a node of any component fails. It never
        starts without the others.
        """
        left = [component for component in self.components if component.state not in _ENDED]
        return self.active and len(left) < self.size


def require_conf(slurm_conf: str | None) -> None:
    """Refuse a cluster whose slurm.conf is gone: Slurm's commands would look for another one for a minute.

    Raises:
        ClusterError: the file is not there.
    """
    if slurm_conf is not None and not Path(slurm_conf).is_file():
        raise ClusterError(f"{slurm_conf} does not exist; is the cluster up?")


class SlurmClient:
    """Commands against one Slurm cluster. Every method raises ClusterError with what the command printed."""

    def __init__(self, slurm_conf: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._slurm_conf = slurm_conf
        self._timeout_s = timeout_s
        self._environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # a user's own format cannot be read
        if slurm_conf is not None:
            self._environment["SLURM_CONF"] = slurm_conf

    def ping(self) -> bool:
        """Whether the controller answers."""
        try:
            return " UP" in self._run("scontrol", "ping")
        except ClusterError:
            return False

    def partitions(self) -> dict[str, Partition]:
        """Return all partitions by name."""
        found: dict[str, Partition] = {}
        for name, up, counts, cpus, gres in self._table("sinfo", "--noheader", "--format=%R|%a|%F|%c|%G"):
            allocated, idle, _, total = (int(part) for part in counts.split("/"))
            usable = allocated + idle
            this = Partition(
                name, up == "up", total, usable, idle, int(cpus.rstrip("+")), "" if gres == "(null)" else gres
            )
            # sinfo prints a line per kind of node; a partition with several kinds is their sum.
            found[name] = _sum(found[name], this) if name in found else this
        return found

    def nodes(self) -> list[NodeState]:
        """Return all nodes, once each."""
        found: dict[str, NodeState] = {}
        for name, state, reason in self._table("sinfo", "--noheader", "--Node", "--format=%N|%t|%E"):
            found[name] = NodeState(
                name, state.rstrip("*~#!%$@^-"), not state.endswith("*"), "" if reason == "none" else reason
            )
        return list(found.values())

    def nodes_of(self, partition: str) -> dict[str, bool]:
        """Return the nodes of a partition, and whether each can be used."""
        rows = self._table("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%t")
        return {name: state.startswith(("idle", "mix", "alloc", "comp")) for name, state in rows}

    def nodes_by_partition(self, partitions: Iterable[str]) -> dict[str, dict[str, bool]]:
        """Return `nodes_of` each of some partitions, by name."""
        return {name: self.nodes_of(name) for name in sorted(partitions)}

    def run_on(self, partition: str, nodes: Sequence[str], argv: Sequence[str]) -> str:
        """Run a command once on each of some nodes.

        Nodes that are busy to the last core are waited for, up to the time-out of a command.

        Args:
            partition: of the nodes.
            nodes: their names.
            argv: the command.

        Returns:
            What they print, all together.

        Raises:
            ClusterError: srun failed, or took too long.
        """
        where = (f"--partition={partition}", f"--nodelist={compress(nodes)}", f"--nodes={len(nodes)}")
        size = ("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=256M", "--time=00:02:00")
        return self._run("srun", "--job-name=primeslurm-doctor", *where, *size, *argv)

    def job(self, job_id: str) -> JobState | None:
        """Find a job with all its components, or None if neither the controller nor the accounting knows it."""
        try:
            return parse_job(self._run("scontrol", "--oneliner", "show", "job", job_id))
        except ClusterError as error:
            if "Invalid job id" not in str(error):
                raise
        try:
            return parse_sacct(self._run("sacct", *_SACCT, f"--jobs={job_id}"))
        except ClusterError:
            return None  # no accounting on this cluster

    def kill_wait_s(self) -> float:
        """Return how long Slurm waits between SIGTERM and SIGKILL when it ends a job, in seconds."""
        found = re.search(r"^KillWait\s*=\s*(\d+)", self._run("scontrol", "show", "config"), re.MULTILINE)
        return float(found[1]) if found else KILL_WAIT_S

    def job_ids(self) -> list[str]:
        """Ids of all jobs that wait or run, one per heterogeneous job."""
        lines = self._run("squeue", "--noheader", "--format=%i").splitlines()
        return list(dict.fromkeys(line.partition("+")[0] for line in lines))

    def cancel(self, job_id: str) -> None:
        """End a job with all its components."""
        self._run("scancel", job_id)

    def cancel_all(self) -> None:
        """End every job of the cluster that the caller may end."""
        for job_id in self.job_ids():
            self.cancel(job_id)

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue; `job_id` is the leader's."""
        self._run("scontrol", "requeue", job_id)

    def exclude(self, job_id: str, hostlist: str) -> None:
        """Keep a waiting job, with all its components, away from nodes; in place of those that it kept away from."""
        self._run("scontrol", "update", f"jobid={job_id}", f"ExcNodeList={hostlist}")

    def _table(self, *argv: str) -> list[list[str]]:
        """The rows of an answer whose columns, named by the last word of the command, are parted by |."""
        parted = argv[-1].count("|")
        rows = [line.split("|", parted) for line in self._run(*argv).splitlines()]
        if strange := [row for row in rows if len(row) != parted + 1]:
            raise ClusterError(f"{argv[0]} gave an answer that is no table: {strange[0][0]}")
        return rows

    def _run(self, *argv: str) -> str:
        require_conf(self._slurm_conf)
        try:
            # Names and reasons may be in any encoding: administrators type them.
            done = subprocess.run(
                argv,
                env=self._environment,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=self._timeout_s,
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{argv[0]} is not installed on this machine") from error
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{argv[0]} gave no answer within {self._timeout_s:g} s") from error
        if done.returncode:
            text = (done.stderr or done.stdout).strip()
            raise ClusterError(f"{' '.join(argv[:3])}: {text or f'exit code {done.returncode}'}")
        return done.stdout


def _sum(a: Partition, b: Partition) -> Partition:
    cpus = min(a.cpus_per_node, b.cpus_per_node)
    nodes, usable, idle = a.nodes + b.nodes, a.usable + b.usable, a.idle + b.idle
    return Partition(a.name, a.up or b.up, nodes, usable, idle, cpus, a.gres or b.gres)


def parse_job(text: str) -> JobState:
    """Parse the output of `scontrol --oneliner show job` for one job: a line per component."""
    lines = [line for line in text.splitlines() if line.strip()]
    components = []
    for line in lines:
        value = _fields(line)
        components.append(
            JobComponent(
                value["JobId"],
                int(value.get("HetJobOffset", "0")),
                value["Partition"],
                value["JobState"],
                "" if value.get("NodeList", "(null)") == "(null)" else value["NodeList"],
            )
        )
    components.sort(key=lambda component: component.offset)
    leader = next(_fields(line) for line in lines if _fields(line)["JobId"] == components[0].job_id)
    return JobState(
        job_id=leader.get("HetJobId", leader["JobId"]),
        state=leader["JobState"],
        reason="" if leader["Reason"] == "None" else leader["Reason"],
        restarts=int(leader["Restarts"]),
        start=leader["StartTime"],
        exit_code=None if components[0].state not in _ENDED else int(leader["ExitCode"].partition(":")[0]),
        components=tuple(components),
        source="scontrol",
        size=len(expand(f"[{ids}]")) if (ids := leader.get("HetJobIdSet")) else 1,
        preempted_at=_unix_seconds(leader.get("PreemptTime", "None")),
        ends_at=_unix_seconds(leader.get("EndTime", "Unknown")),
    )


def _unix_seconds(text: str) -> float | None:
    """Convert Slurm's local time; None for its words for no time: None, Unknown, N/A."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _fields(line: str) -> dict[str, str]:
    # A value with spaces (Comment) may hold what looks like a field; that comes late in the line, so the first wins.
    return dict(reversed(re.findall(r"(?:^| )(\w+)=(\S*)", line)))


_SACCT = ("--allocations", "--parsable2", "--noheader", "--format=JobID,Partition,State,NodeList,Start,ExitCode")


def parse_sacct(text: str) -> JobState | None:
    """Parse the output of `sacct` with the fields of `SlurmClient.job`; None if it lists nothing."""
    rows = [line.split("|") for line in text.splitlines() if line]
    if not rows:
        return None
    components = []
    for job_id, partition, state, nodes, _, _ in rows:
        offset = int(job_id.partition("+")[2] or 0)
        word = state.partition(" ")[0]  # sacct writes "CANCELLED by 0"
        components.append(JobComponent(job_id, offset, partition, word, "" if nodes == "None assigned" else nodes))
    return JobState(
        job_id=components[0].job_id.partition("+")[0],
        state=components[0].state,
        reason="",
        restarts=0,
        start=rows[0][4],
        exit_code=int(rows[0][5].partition(":")[0]),
        components=tuple(components),
        source="sacct",
    )
