"""Submit, resume and dry-run jobs; list bad nodes; and compare the packages of nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from primeslurm.api.checks.recipe_check import SlurmAnswer
from primeslurm.api.jobs import ANSWER_S, find_job, record_interrupted_submission
from primeslurm.api.sites import find_site
from primeslurm.base import durable
from primeslurm.base.errors import ClusterError, PrimeslurmError, UsageError, Violation
from primeslurm.base.hostlists import expand
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import Planned, refusals, refuse
from primeslurm.recipe import Site
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.recipe.reading.recipe_files import independent
from primeslurm.records.attempt import JobRecord
from primeslurm.run.attempt_claims import claim_attempt, new_token, owner
from primeslurm.run.bad_nodes import (
    BadNode,
    BadNodeLedger,
    excludable_nodes,
    exclude_bad_nodes,
    excluded,
    write_excluded,
)
from primeslurm.run.directory import Attempt, RunDirectory, create, discard, missing_variables, name_in_use
from primeslurm.run.directory_security import permission_problems
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient, require_conf
from primeslurm.slurm.cluster_fit import cluster_facts, cluster_fit_problems
from primeslurm.slurm.inventory import InstalledDifference, Parts
from primeslurm.slurm.render import render
from primeslurm.slurm.submission_signals import HeldSignals, signals_held
from primeslurm.wire.transport import secret

if TYPE_CHECKING:
    from primeslurm.node.entry import AgentTask


# Seconds to look for a job that slurmctld may have accepted after sbatch had timed out.
LATE_JOB_S = 10.0
_LATE_JOB_POLL_S = 1.0


@dataclass(frozen=True)
class DryRun:
    """Plan and batch script of a dry run."""

    plan: Plan
    script: str  # the batch script; empty for a run without Slurm
    unasked: tuple[str, ...] = ()  # checks that could not be made, and why
    details: str = ""


@dataclass(frozen=True)
class Submitted:
    """A submitted attempt."""

    plan: Plan
    attempt: int
    job_id: str  # id of the Slurm job, or of the process that runs a local attempt


def dry_run(plan: Plan, slurm_conf: str | None, *, ask: bool) -> DryRun:
    """Make all checks of a submission, and render its script. Nothing is written.

    Slurm is queried only if `ask` is set. Raises UsageError with all reasons why any machine would refuse the plan.
    """
    unasked, details = tuple[str, ...](), ""
    problems = (
        refusals(plan.findings, "error")
        + name_in_use(Path(plan.run_dir))
        + permission_problems(Path(plan.run_dir))
        + missing_variables(plan)
    )
    if plan.executor == "slurm" and ask:
        with contextlib.suppress(ClusterError):  # the next query fails, too, and reports it
            plan = avoid_bad_nodes(plan, slurm_conf)
        answer = ask_slurm([plan], slurm_conf, whole=not problems)
        problems += answer.problems
        unasked, details = (answer.note,) if answer.note else (), answer.details
    if problems:
        raise UsageError(problems)
    return DryRun(plan, _script(plan), unasked, details)


def refuse_unfit(plan: Plan) -> None:
    """Raise UsageError if the plan cannot be submitted from this machine. Slurm is not queried."""
    refuse(plan, "error", "blocked")
    directory = RunDirectory(Path(plan.run_dir))
    if directory.exists():  # records the job of an interrupted submission, so that it is visible
        with contextlib.suppress(ClusterError):
            record_interrupted_submission(directory, ANSWER_S)
    if problems := name_in_use(Path(plan.run_dir)) + permission_problems(Path(plan.run_dir)) + missing_variables(plan):
        raise UsageError(problems)


def submit(planned: Planned, source: Path | None, slurm_conf: str | None) -> Submitted:
    """Create the run directory, copy the recipe file `source` (if any) into it, and submit the job.

    Raises UsageError with all reasons if the plan is refused. Raises ClusterError if Slurm refused the job or did not
    answer; the run directory is then removed.
    """
    plan = planned.plan
    refuse_unfit(plan)
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, slurm_conf)
        if problems := cluster_fit_problems(plan, cluster_facts(SlurmClient(slurm_conf))):
            raise UsageError(problems)
    script = _script(plan)
    # A signal between sbatch and the record of the job's id would leave a job that nobody knows.
    with signals_held(plan.run) as held:
        return _start(create(planned.recipe, plan, source, _intent(plan, slurm_conf)), plan, script, held)


def resume(directory: RunDirectory, previous: Attempt) -> Submitted:
    """Submit a new attempt of a run whose newest attempt, `previous`, has ended.

    Raises UsageError if a variable of `pass_env` is not set, or another process has resumed the run; ClusterError if
    Slurm refused the job or did not answer; RunError if records are damaged.
    """
    # Check permissions before any record is read, because another user may have written it.
    if problems := permission_problems(directory.path):
        raise UsageError(problems)
    plan, job = previous.plan(), previous.job()
    if problems := missing_variables(plan):
        raise UsageError(problems)
    slurm_conf = job.slurm_conf if job else None
    if plan.executor == "slurm":
        require_cluster(plan, slurm_conf)
        plan = avoid_bad_nodes(plan, slurm_conf)
    script = _script(plan)
    with signals_held(plan.run) as held:
        attempt = claim_attempt(directory, previous.number + 1, plan, _intent(plan, slurm_conf))
        if attempt is None:
            raise UsageError([in_use(directory, "in use")])
        secret.create(directory.path)  # replaces a lost secret; every attempt reads it again
        return _start(attempt, plan, script, held)


def require_cluster(plan: Plan, slurm_conf: str | None) -> None:
    """Raise ClusterError if a run's Slurm configuration is missing, with the command that restarts the cluster."""
    from primeslurm.api.testbed import default_directory

    try:
        require_conf(slurm_conf)
    except ClusterError as error:
        name = Path(slurm_conf or "").parent.name
        if default_directory(name) != Path(slurm_conf or "").parent:
            raise
        gpu_nodes = sum(group.nodes for group in plan.groups if group.requested_gres)
        sizes = f"--nodes {gpu_nodes} --control-nodes {plan.allocated - gpu_nodes}"
        fix = f"`primeslurm cluster up --name {name} {sizes}` starts it; then repeat this command"
        raise ClusterError(f"{error} {fix}") from None


def in_use(directory: RunDirectory, phase: str) -> Violation:
    """Return the violation that names the owner of an active run, which cannot be resumed."""
    why = f"is {phase}: there is nothing to resume, {owner(directory.latest())} owns it"
    return Violation("RUN", directory.name, why)


def _intent(plan: Plan, slurm_conf: str | None) -> JobRecord:
    # Written before the submission. If sbatch's answer is lost, the token identifies the job in Slurm.
    return JobRecord("", plan.executor, time.time(), slurm_conf, new_token(), socket.gethostname(), os.getpid())


def _script(plan: Plan) -> str:
    return "" if plan.executor == "local" else render(plan)


def ask_slurm(plans: Sequence[Plan], slurm_conf: str | None, *, whole: bool = True) -> SlurmAnswer:
    """Ask Slurm whether it can ever run a job, without submitting it.

    Only problems of all `plans`, which are variants of one recipe, are reported. With `whole`, `sbatch --test-only` is
    run on the first plan.
    """
    client = SlurmClient(slurm_conf, ANSWER_S)
    try:
        facts = cluster_facts(client)
        problems = independent([cluster_fit_problems(plan, facts) for plan in plans], ())
        if whole and not problems and (refusal := client.refusal(render(plans[0]))):
            problems.append(Violation("slurm", "", f"sbatch would refuse the job: {refusal}"))
        return SlurmAnswer(tuple(problems))
    except ClusterError as error:
        command = re.match(r"\w+", str(error))
        failed = f" ({command[0]} failed; details with --verbose)" if command else ""
        note = f"Slurm is not reachable from here{failed}, so partitions, limits and accounts were not checked"
        return SlurmAnswer((), note, str(error))


def _start(attempt: Attempt, plan: Plan, script: str, held: HeldSignals) -> Submitted:
    # If Slurm refuses the job, the attempt is removed. If it is unknown whether Slurm has the job, the attempt stays.
    from primeslurm.node.entry import AgentTask  # slow import of the whole agent

    job = attempt.job()
    assert job is not None
    task = AgentTask(plan.run_dir, attempt.number, job.submission)
    try:
        if plan.executor == "local":
            from primeslurm.slurm.local.submit import submit_local

            job_id = submit_local(plan, task, job.submission)
        else:
            path = attempt.path / "job.sbatch"
            durable.write(path, script)
            job_id = _submit_or_find(plan, task, path, job)
    except _UnknownError:
        attempt.record_job(msgspec.structs.replace(job, pid=0))
        raise
    except (PrimeslurmError, OSError):
        discard(attempt)
        raise
    attempt.record_job(msgspec.structs.replace(job, job_id=job_id))
    _record_excluded(plan)
    how_to_end = f"`primeslurm cancel {shlex.quote(plan.run_dir)}` ends it"
    held.done = f"submitted {plan.run} as {plan.executor} job {job_id}; {how_to_end}"
    return Submitted(plan, attempt.number, job_id)


class _UnknownError(ClusterError):
    """It is unknown whether Slurm has the job."""


def _submit_or_find(plan: Plan, task: AgentTask, script: Path, job: JobRecord) -> str:
    """Submit a job and return its id, even if sbatch failed after slurmctld had accepted the job."""
    from primeslurm.slurm import executor

    try:
        return executor.submit(plan, task, script, job.slurm_conf, job.submission)
    except ClusterError as error:
        uncertain = isinstance(error, executor.UncertainSubmissionError)
        until = time.monotonic() + (LATE_JOB_S if uncertain else 0.0)
        while True:
            try:
                job_id = _taken(job, uncertain)
            except ClusterError as no_answer:
                if not uncertain:
                    raise error from no_answer
                if time.monotonic() >= until:
                    why = "Slurm does not answer, so it is unknown whether Slurm has the job"
                    raise _UnknownError(
                        f"{error}; {why}. `primeslurm status {shlex.quote(plan.run_dir)}` asks again"
                    ) from no_answer
            else:
                if job_id is not None:
                    return job_id
                if time.monotonic() >= until:
                    raise
            time.sleep(_LATE_JOB_POLL_S)


def _taken(job: JobRecord, uncertain: bool) -> str | None:
    """Return the job's id if Slurm has the job although sbatch failed, else None."""
    job_id = find_job(job, ANSWER_S)
    if job_id is None or uncertain:
        return job_id
    # Slurm creates the components of a heterogeneous job one by one. If a limit refuses a later component, Slurm
    # cancels the earlier ones, and still lists them for some minutes.
    state = SlurmClient(job.slurm_conf, ANSWER_S).job(job_id)
    return None if state is not None and state.state == "CANCELLED" else job_id


def _record_excluded(plan: Plan) -> None:
    run_dir = Path(plan.run_dir)
    bad = [entry for entry in bad_nodes(run_dir.parent, time.time()) if entry.node in plan.job.avoid]
    if bad or excluded(run_dir):
        write_excluded(run_dir, bad)


def bad_nodes(runs: Path, now: float) -> list[BadNode]:
    """Return the bad nodes of a directory of runs, newest first. `now` is Unix time."""
    return BadNodeLedger(runs).entries(now)


def avoid_bad_nodes(plan: Plan, slurm_conf: str | None) -> Plan:
    """Exclude bad nodes from a plan's job, unless a partition needs them. Raises ClusterError."""
    now = time.time()
    bad = bad_nodes(Path(plan.run_dir).parent, now)
    if not bad:
        return exclude_bad_nodes(plan, [], now)
    names = {group.partition for group in plan.groups}
    partitions = SlurmClient(slurm_conf).nodes_by_partition(names, plan.job.reservation)
    partition_nodes = {node for nodes in partitions.values() for node in nodes}
    avoided = excludable_nodes(plan, bad, partitions)
    needed = [entry for entry in bad if entry.node in partition_nodes and entry not in avoided]
    return exclude_bad_nodes(plan, avoided, now, needed=needed)


def forget_bad_nodes(runs: Path, hostlists: Sequence[str], now: float, *, every: bool = False) -> list[str]:
    """Remove nodes (with `every`, all nodes) from the ledger of bad nodes, and return their names, sorted.

    Raises UsageError if a host list has no node of the ledger. No node is removed in this case.
    """
    ledger = BadNodeLedger(runs)
    bad = [entry.node for entry in ledger.entries(now)]
    nodes, problems = set(bad) if every else set[str](), list[Violation]()
    for hostlist in hostlists:
        try:
            matches = set(expand(hostlist)) & set(bad)
        except ValueError as error:
            problems.append(Violation("--forget", hostlist, str(error), "for example node[001-003],login1"))
            continue
        if not matches:
            why = "is not in the ledger of bad nodes"
            problems.append(Violation("--forget", hostlist, why, suggestion(hostlist, bad)))
        nodes |= matches
    if problems:
        raise UsageError(problems)
    for name in sorted(nodes):
        ledger.forget(name)
    return sorted(nodes)


@dataclass(frozen=True)
class Installed:
    """Installed packages of nodes."""

    nodes: Mapping[str, Parts]
    """Package versions by node. A node that runs no jobs now has only the entry `node`, with its state."""
    differences: Sequence[InstalledDifference]

    @property
    def well(self) -> bool:
        """True if all required packages have the locked version."""
        return not any(each.required for each in self.differences)


def installed(site_file: Path | None, node: str | None = None, *, every: bool = False) -> Installed:
    """Compare the installed packages of this host, one node, or all nodes of the site with the lock file.

    Raises UsageError if the node or the site file does not exist, and ClusterError if Slurm does not answer, or nodes
    are not free within a minute.
    """
    if node is not None and every:
        raise UsageError([Violation("--node", node, "contradicts --all", "keep one of them")])
    site = find_site(site_file) if node or every or site_file else None
    nodes: dict[str, Parts] = {}
    gpu_nodes: list[str] = []
    if site is not None and (node or every):
        nodes |= inventory.on_nodes(site, SlurmClient(site.slurm_conf), node)
        gpu_nodes = _gpu_nodes(site)
    else:
        nodes |= inventory.installed_on_this_host()
    pins = inventory.locked_versions(site.device if site else device_of(nodes))
    return Installed(nodes, inventory.differences(nodes, pins, gpu_nodes))


def device_of(nodes: Mapping[str, Parts]) -> str:
    """Return the device for which torch is installed. A login node has no GPU, but may have the packages for GPUs."""
    with_torch = [parts for parts in nodes.values() if parts.get("torch")]
    if not with_torch:
        return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return "cuda" if any(parts.get("cuda of torch") for parts in with_torch) else "cpu"


def _gpu_nodes(site: Site) -> list[str]:
    if site.device != "cuda":
        return []
    partitions = {kind.partition for kind in site.nodes.values() if kind.gpus}
    return [name for partition in partitions for name in SlurmClient(site.slurm_conf).nodes_of(partition)]
