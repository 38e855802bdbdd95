"""Typed wrappers of Slurm's commands: queries about nodes and jobs, and a few actions."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from primeslurm.base.errors import ClusterError
from primeslurm.base.hostlists import compress, expand
from primeslurm.slurm.accounting import (
    ASSOCIATION_FORMAT,
    NO_ACCOUNTING,
    QOS_FORMAT,
    Accounting,
    config_value,
    lists_subaccounts,
    parse_associations,
    parse_enforced,
    parse_qos,
)
from primeslurm.slurm.environment import clean, inherited_by_jobs
from primeslurm.slurm.partitions import (
    NODE_FORMAT,
    Partition,
    Reservation,
    fields,
    is_usable,
    parse_partitions,
    parse_reservations,
    plain_state,
)

if TYPE_CHECKING:
    from primeslurm.recipe import Site

# Refusals of `sbatch --test-only` that may pass. `cluster_fit` finds resources that nodes never have.
_TRANSIENT = (
    *("Requested node configuration is not available", "Required node not available", "Requested nodes are busy"),
    *("Unable to contact", "Socket timed out", "Requested partition configuration not available now"),
    *("Zero Bytes", "temporarily"),
)
# Longest wait for the answer of a command [s]
TIMEOUT_S = 60.0
# Slurm's default for KillWait [s]
KILL_WAIT_S = 30.0
_ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)
_SQUEUE_ALL = ("squeue", "--noheader", "--all", "--states=all")
_SACCT = ("sacct", "--allocations", "--parsable2", "--noheader")
# Largest difference between the clocks of this host and the accounting [s]
_CLOCKS_S = 3600.0
# Things that jobs may share, and that have limits for all of their jobs together
Shared = Literal["user", "account", "qos"]


@dataclass(frozen=True)
class NodeState:
    """A node and its state."""

    name: str
    state: str  # Slurm's short word: idle, alloc, mix, down, drain ...
    responding: bool  # whether the node's daemon answers the controller
    reason: str


@dataclass(frozen=True)
class JobComponent:
    """One component of a job. Jobs that are not heterogeneous have one."""

    job_id: str
    offset: int
    partition: str
    state: str
    nodes: str  # Host list in Slurm's notation. Empty while the job is pending.
    reason: str = ""  # Why the component is pending. Empty: no reason.


@dataclass(frozen=True)
class JobState:
    """State of a job. `source` is sacct if the controller no longer knows the job."""

    job_id: str
    state: str  # state of the leading component, for example PENDING
    reason: str  # Why the job is pending or ended. Empty: no reason.
    restarts: int
    start: str  # start or expected start in ISO format, or Unknown
    exit_code: int | None
    components: tuple[JobComponent, ...]
    source: Literal["scontrol", "sacct"]
    size: int = 1  # Number of components at submission. Slurm forgets components some minutes after their end.
    shares: tuple[str, ...] = ()
    """User, account and QOS, whose limits count all of their jobs together. Empty words for none."""
    preempted_at: float | None = None  # Start of a preemption [Unix s]. None: the job was not preempted.
    ends_at: float | None = None
    """When Slurm ends the job: at its time limit, or after the grace time of a preemption [Unix s]. None: unknown."""

    @property
    def active(self) -> bool:
        """Return whether the job runs or may still run."""
        return self.state not in _ENDED

    @property
    def broken_up(self) -> bool:
        """Return whether the leading component is active although other components have ended."""
        # If a node fails and its component has a single node left, Slurm requeues that component alone. It never starts
        # without the others.
        left = [component for component in self.components if component.state not in _ENDED]
        return self.active and len(left) < self.size


def require_conf(slurm_conf: str | None) -> None:
    """Raise ClusterError if slurm.conf is missing. Slurm's commands would search for another one for a minute."""
    if slurm_conf is not None and not Path(slurm_conf).is_file():
        raise ClusterError(f"{slurm_conf} does not exist; is the cluster up?")


class SlurmClient:
    """Commands for one Slurm cluster. Every method raises ClusterError with the output of a command that failed."""

    def __init__(self, slurm_conf: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._slurm_conf = slurm_conf
        self._timeout_s = timeout_s
        # Times in the user's own SLURM_TIME_FORMAT could not be parsed.
        self._environment = {**clean(os.environ, slurm_conf), "SLURM_TIME_FORMAT": "standard"}

    def ping(self) -> bool:
        try:
            return " UP" in self._run("scontrol", "ping")
        except ClusterError:
            return False

    def partitions(self) -> dict[str, Partition]:
        """Return all partitions by name, including those that are hidden from this user."""
        nodes = self._nodes(NODE_FORMAT)
        return parse_partitions(self._run("scontrol", "--all", "--oneliner", "show", "partition"), nodes)

    def nodes(self) -> list[NodeState]:
        states: dict[str, NodeState] = {}
        for name, state, reason in self._nodes("%N|%t|%E"):
            states[name] = NodeState(name, plain_state(state), "*" not in state, "" if reason == "none" else reason)
        return list(states.values())

    def nodes_of(self, partition: str, reservation: str | None = None) -> dict[str, str]:
        """Return the nodes of a partition (or of its reservations) and their states in sinfo's short words."""
        reserved = self._reserved(reservation)
        rows = self._nodes("%N|%R|%t")
        return {
            name: state
            for name, node_partition, state in rows
            if node_partition == partition and (not reserved or name in reserved)
        }

    def nodes_by_partition(self, names: Iterable[str], reservation: str | None = None) -> dict[str, dict[str, bool]]:
        """Return the nodes of partitions, and whether each runs jobs now or soon. Arguments as in `nodes_of`."""
        return {
            name: {
                node: is_usable(state, reserved=reservation is not None)
                for node, state in self.nodes_of(name, reservation).items()
            }
            for name in sorted(names)
        }

    def _nodes(self, columns: str) -> list[list[str]]:
        # Hidden partitions need --all, and sinfo refuses --partition together with it.
        return self._table("sinfo", "--noheader", "--all", "--Node", f"--format={columns}")

    def reservations(self) -> list[Reservation]:
        """Return the reservations that this user may see."""
        try:
            return parse_reservations(self._run("scontrol", "--all", "--oneliner", "show", "reservation"))
        except ClusterError as error:
            if "No reservations" in str(error):
                return []
            raise

    def _reserved(self, names: str | None) -> set[str]:
        wanted = (names or "").split(",")
        reservations = [each for each in self.reservations() if each.name in wanted] if names else []
        return {node for each in reservations if each.nodes for node in expand(each.nodes)}

    def accounting(self) -> Accounting:
        """Return accounts, QOS and limits of this user. Empty if the accounting enforces nothing or does not answer."""
        config = self._run("scontrol", "show", "config")
        enforced = parse_enforced(config)
        if not enforced:
            return NO_ACCOUNTING
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
            condition = ("where", f"user={user}", f"cluster={config_value(config, 'ClusterName')}")
            associations = self._sacctmgr("associations", *condition, columns=ASSOCIATION_FORMAT)
            default = self._sacctmgr("user", "where", f"name={user}", columns="user,defaultaccount")
            qos = self._sacctmgr("qos", columns=QOS_FORMAT)
        except (ClusterError, KeyError):
            return NO_ACCOUNTING
        account = next((row[1] for row in default if row[0] == user), "")
        rows = parse_associations(associations)
        return Accounting(enforced, account, rows, parse_qos(qos), subaccounts=lists_subaccounts(config))

    def _sacctmgr(self, *what: str, columns: str) -> list[list[str]]:
        text = self._run("sacctmgr", "--noheader", "--parsable2", "show", *what, f"format={columns}")
        rows = [line.split("|") for line in text.splitlines() if line]
        return [row for row in rows if len(row) == columns.count(",") + 1]

    def refusal(self, script: str) -> str:
        """Return the message with which sbatch would refuse a batch script; empty if it would accept it.

        Refusals that may pass do not count, for example because nodes are down or have not reported yet.
        """
        unset = {name: value for name, value in self._environment.items() if name not in inherited_by_jobs([name])}
        done = self._call(["sbatch", "--test-only"], input=script, env=unset)
        if done.returncode == 0:
            return ""
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        words = "; ".join(line.removeprefix("allocation failure: ") for line in lines if line.strip())
        return "" if any(transient in words for transient in _TRANSIENT) else words

    def run_on(self, site: Site, partition: str, nodes: Sequence[str], argv: Sequence[str]) -> str:
        """Run a command once on each of some nodes, with the account, QOS and reservation of the site.

        Returns the output of all nodes. Waits for busy nodes up to the timeout of a command.
        """
        where = (f"--partition={partition}", f"--nodelist={compress(nodes)}", f"--nodes={len(nodes)}")
        per_cpu = any(kind.mem_per_cpu for kind in site.nodes.values() if kind.partition == partition)
        size = ("--ntasks-per-node=1", "--cpus-per-task=1", "--time=00:02:00")
        memory = "--mem-per-cpu=256M" if per_cpu else "--mem=256M"
        options_of_site = {"account": site.slurm.account, "qos": site.slurm.qos, "reservation": site.slurm.reservation}
        whose = [f"--{name}={value}" for name, value in options_of_site.items() if value]
        options = (*where, *size, memory, *whose, *site.slurm.extra)
        return self._run("srun", "--job-name=primeslurm-doctor", *options, *argv)

    def job(self, job_id: str) -> JobState | None:
        """Return a job with all its components; None if neither the controller nor the accounting knows it."""
        try:
            return parse_job(self._run("scontrol", "--oneliner", "show", "job", job_id))
        except ClusterError as error:
            if "Invalid job id" not in str(error):
                raise
        try:
            columns = "--format=JobID,Partition,State,NodeList,Start,ExitCode"
            return parse_sacct(self._run(*_SACCT, columns, f"--jobs={job_id}"))
        except ClusterError:
            return None  # no accounting on this cluster

    def find(self, word: str, since: float) -> str | None:
        """Return the id of the job that was submitted with `word` as argument or comment; None if there is none.

        The accounting is searched for jobs after `since` [Unix s].
        """
        format_ = "--format=%i|%T|%o|%k"
        rows = [line.split("|", 2) for line in self._run(*_SQUEUE_ALL, format_).splitlines() if word in line]
        # A job that is active counts more than one of the same submission that has ended.
        rows.sort(key=lambda row: row[1] in _ENDED)
        if rows:
            return rows[0][0].partition("+")[0]
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - _CLOCKS_S))
        for columns in ("JobID,SubmitLine,Comment", "JobID,Comment"):  # SubmitLine is there since Slurm 21.08
            try:
                lines = self._run(*_SACCT, f"--starttime={start}", f"--format={columns}").splitlines()
            except ClusterError:
                continue  # no accounting on this cluster, or it is older
            job_ids = [line.partition("|")[0].partition("+")[0] for line in lines if word in line]
            return job_ids[0] if job_ids else None
        return None

    def kill_wait_s(self) -> float:
        """Return Slurm's KillWait: the seconds between SIGTERM and SIGKILL when it ends a job."""
        return float(config_value(self._run("scontrol", "show", "config"), "KillWait") or KILL_WAIT_S)

    def job_ids(self) -> list[str]:
        """Return the ids of all pending and running jobs, one per heterogeneous job."""
        lines = self._run("squeue", "--noheader", "--format=%i").splitlines()
        return list(dict.fromkeys(line.partition("+")[0] for line in lines))

    def rivals(self, job: JobState) -> set[Shared]:
        """Return what other running jobs share with `job`: limits count all of them together."""
        names: tuple[Shared, ...] = ("user", "account", "qos")
        names_of_job = dict(zip(names, (word.partition("(")[0] for word in job.shares), strict=False))
        own_ids = {component.job_id for component in job.components}
        rows = self._table("squeue", "--noheader", "--all", "--states=RUNNING,COMPLETING", "--format=%A|%u|%a|%q")
        others = [dict(zip(names, row, strict=True)) for job_id, *row in rows if job_id not in own_ids]
        return {name for name, value in names_of_job.items() if value and any(other[name] == value for other in others)}

    def cancel(self, job_id: str) -> None:
        self._run("scancel", job_id)

    def cancel_all(self) -> None:
        """Cancel every job of the cluster that the caller may cancel."""
        for job_id in self.job_ids():
            self.cancel(job_id)

    def requeue(self, job_id: str) -> None:
        """Requeue a job, given the id of its leading component."""
        self._run("scontrol", "requeue", job_id)

    def exclude(self, job_id: str, hostlist: str) -> None:
        """Replace the nodes that a pending job, with all its components, must not get."""
        self._run("scontrol", "update", f"jobid={job_id}", f"ExcNodeList={hostlist}")

    def _table(self, *argv: str) -> list[list[str]]:
        """Return the rows of an answer with columns separated by |. The last word of the command names the columns."""
        parted = argv[-1].count("|")
        rows = [line.split("|", parted) for line in self._run(*argv).splitlines()]
        if strange := [row for row in rows if len(row) != parted + 1]:
            raise ClusterError(f"{argv[0]} gave an answer that is no table: {strange[0][0]}")
        return rows

    def _run(self, *argv: str) -> str:
        done = self._call(argv)
        if done.returncode:
            text = (done.stderr or done.stdout).strip()
            raise ClusterError(f"{' '.join(argv[:3])}: {text or f'exit code {done.returncode}'}")
        return done.stdout

    def _call(
        self, argv: Sequence[str], *, input: str | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        require_conf(self._slurm_conf)
        try:
            return subprocess.run(
                argv,
                env=env or self._environment,
                input=input,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # names and reasons may have any encoding
                timeout=self._timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise ClusterError(f"{argv[0]} is not installed on this machine") from error
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{argv[0]} gave no answer within {self._timeout_s:g} s") from error


def parse_job(text: str) -> JobState:
    """Parse the output of `scontrol --oneliner show job` for one job: a line per component."""
    values = [fields(line) for line in text.splitlines() if line.strip()]
    values.sort(key=_offset)
    leader = values[0]
    components = [
        JobComponent(
            job_id=value["JobId"],
            offset=_offset(value),
            partition=value["Partition"],
            state=value["JobState"],
            nodes=_known(value, "NodeList"),
            reason=_known(value, "Reason"),
        )
        for value in values
    ]
    return JobState(
        job_id=leader.get("HetJobId", leader["JobId"]),
        state=leader["JobState"],
        reason=_known(leader, "Reason"),
        restarts=int(leader["Restarts"]),
        start=leader["StartTime"],
        exit_code=None if components[0].state not in _ENDED else int(leader["ExitCode"].partition(":")[0]),
        components=tuple(components),
        source="scontrol",
        size=len(expand(f"[{ids}]")) if (ids := leader.get("HetJobIdSet")) else 1,
        preempted_at=_unix_seconds(leader.get("PreemptTime", "None")),
        ends_at=_unix_seconds(leader.get("EndTime", "Unknown")),
        shares=tuple(_known(leader, name) for name in ("UserId", "Account", "QOS")),
    )


def _unix_seconds(text: str) -> float | None:
    """Convert Slurm's local time; None for its words for no time (None, Unknown, N/A)."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _offset(value: Mapping[str, str]) -> int:
    return int(value.get("HetJobOffset", "0"))


def _known(value: Mapping[str, str], name: str) -> str:
    word = value.get(name, "")
    return "" if word in ("None", "(null)") else word


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
