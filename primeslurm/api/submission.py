"""What starts a job: submit and resume, and the dry run of a submission."""

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

from primeslurm.api.jobs import ANSWER_S, find_job, settle
from primeslurm.api.planning import SlurmAnswer
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
from primeslurm.run.claims import claim_attempt, new_word, owner
from primeslurm.run.directory import Attempt, RunDirectory, create, discard, missing_variables, name_in_use
from primeslurm.run.exclusion import excluded, record_excluded, spared
from primeslurm.run.ledger import BadNode, Ledger, avoiding
from primeslurm.run.ownership import unsafe
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.cluster_fit import cluster_facts, cluster_fit_problems
from primeslurm.slurm.held_signals import HeldSignals, signals_held
from primeslurm.slurm.inventory import InstalledDifference, Parts
from primeslurm.slurm.render import render
from primeslurm.wire.transport import secret

if TYPE_CHECKING:
    from primeslurm.node.entry import AgentTask


LATE_JOB_S = 10.0
"""For so long a job may show up that a busy controller has taken after sbatch had stopped waiting."""
_LATE_JOB_POLL_S = 1.0


@dataclass(frozen=True)
class DryRun:
    """What a submission would do."""

    plan: Plan
    script: str
    """The batch script; empty for a run without Slurm."""
    unasked: tuple[str, ...] = ()
    """What could not be checked, and why."""
    details: str = ""
    """What a command of Slurm answered then."""


@dataclass(frozen=True)
class Submitted:
    """An attempt that was taken."""

    plan: Plan
    attempt: int
    job_id: str
    """The id of the Slurm job, or of the process that keeps a local run."""


def dry_run(plan: Plan, slurm_conf: str | None, *, ask: bool) -> DryRun:
    """Do all that `submit` does before it writes anything.

    Args:
        plan: of the run.
        slurm_conf: SLURM_CONF of its cluster, where it is not the system's own.
        ask: the run's cluster is there, and may be asked.

    Raises:
        UsageError: the plan would be refused anywhere; every reason at once.
    """
    unasked, details = tuple[str, ...](), ""
    problems = (
        refusals(plan.findings, "error")
        + name_in_use(Path(plan.run_dir))
        + unsafe(Path(plan.run_dir))
        + missing_variables(plan)
    )
    if plan.executor == "slurm" and ask:
        with contextlib.suppress(ClusterError):  # the next question is not answered either, and says so
            plan = avoid_bad_nodes(plan, slurm_conf)
        answer = ask_slurm([plan], slurm_conf, whole=not problems)
        problems += answer.problems
        unasked, details = (answer.note,) if answer.note else (), answer.details
    if problems:
        raise UsageError(problems)
    return DryRun(plan, _script(plan), unasked, details)


def refuse_unfit(plan: Plan) -> None:
    """Raise UsageError if anything that is known here speaks against the plan; Slurm is not asked."""
    refuse(plan, "error", "blocked")
    directory = RunDirectory(Path(plan.run_dir))
    if directory.exists():  # what an interrupted submission of this name has started is recorded, so that it is seen
        with contextlib.suppress(ClusterError):
            settle(directory, ANSWER_S)
    if problems := name_in_use(Path(plan.run_dir)) + unsafe(Path(plan.run_dir)) + missing_variables(plan):
        raise UsageError(problems)


def submit(planned: Planned, source: Path, slurm_conf: str | None) -> Submitted:
    """Make the run directory and submit the job; its cluster is up.

    Args:
        planned: the run, whose recipe is kept in the run directory.
        source: the recipe's file, of which a copy is kept beside it.
        slurm_conf: SLURM_CONF of the run's cluster, where it is not the system's own.

    Raises:
        UsageError: something speaks against the plan; every reason at once.
        ClusterError: Slurm refused the job or did not answer. Nothing is left of the run then.
    """
    plan = planned.plan
    refuse_unfit(plan)
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, slurm_conf)
        if problems := _placement(plan, slurm_conf):
            raise UsageError(problems)
    script = _script(plan)
    with signals_held(plan.run) as held:
        return _start(create(planned.recipe, plan, source, _intent(plan, slurm_conf)), plan, script, held)


def resume(directory: RunDirectory, previous: Attempt) -> Submitted:
    """Submit a new attempt of a run that has ended.

    Args:
        directory: of the run.
        previous: attempt that has ended, after which nobody has made another one.

    Raises:
        UsageError: a variable that it needs is not set, or somebody else has resumed the run meanwhile.
        ClusterError: Slurm refused the job or did not answer.
        RunError: its records are damaged.
    """
    if problems := unsafe(directory.path):
        raise UsageError(problems)
    plan, job = previous.plan(), previous.job()
    if problems := missing_variables(plan):
        raise UsageError(problems)
    slurm_conf = job.slurm_conf if job else None
    if plan.executor == "slurm":
        plan = avoid_bad_nodes(plan, slurm_conf)
    script = _script(plan)
    with signals_held(plan.run) as held:
        attempt = claim_attempt(directory, previous.number + 1, plan, _intent(plan, slurm_conf))
        if attempt is None:
            raise UsageError([in_use(directory, "in use")])
        secret.create(directory.path)  # one that was lost: what the run asks for is read anew by every attempt
        return _start(attempt, plan, script, held)


def in_use(directory: RunDirectory, phase: str) -> Violation:
    """Return the violation that says which job owns a run, and that there is nothing to resume."""
    why = f"is {phase}: there is nothing to resume, {owner(directory.latest())} owns it"
    return Violation("RUN", directory.name, why)


def _intent(plan: Plan, slurm_conf: str | None) -> JobRecord:
    """What is on disk before the job is submitted: by its word the job is found if the answer is lost."""
    return JobRecord("", plan.executor, time.time(), slurm_conf, new_word(), socket.gethostname(), os.getpid())


def _script(plan: Plan) -> str:
    return "" if plan.executor == "local" else render(plan)


def _placement(plan: Plan, slurm_conf: str | None) -> list[Violation]:
    return cluster_fit_problems(plan, cluster_facts(SlurmClient(slurm_conf)))


def ask_slurm(plans: Sequence[Plan], slurm_conf: str | None, *, whole: bool = True) -> SlurmAnswer:
    """Ask Slurm whether it would ever run a job. Nothing is submitted.

    Args:
        plans: of one recipe; what is found for all of them is reported.
        slurm_conf: SLURM_CONF of the cluster, where it is not the system's own.
        whole: the first plan is what would be submitted: let sbatch judge it, too.
    """
    client = SlurmClient(slurm_conf, ANSWER_S)
    try:
        facts = cluster_facts(client)
        problems = independent([cluster_fit_problems(plan, facts) for plan in plans], ())
        if whole and not problems and (words := client.refusal(render(plans[0]))):
            problems.append(Violation("slurm", "", f"sbatch would refuse the job: {words}"))
        return SlurmAnswer(tuple(problems))
    except ClusterError as error:
        command = re.match(r"\w+", str(error))
        failed = f" ({command[0]} failed; details with --verbose)" if command else ""
        note = f"Slurm is not reachable from here{failed}, so partitions, limits and accounts were not checked"
        return SlurmAnswer((), note, str(error))


def _start(attempt: Attempt, plan: Plan, script: str, held: HeldSignals) -> Submitted:
    """Submit an attempt. One that is not taken leaves nothing; one of which that is not known stays."""
    from primeslurm.node.entry import AgentTask  # all of the agent, which only a job that starts needs

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
    """Nobody can say at present whether Slurm has the job."""


def _submit_or_find(plan: Plan, task: AgentTask, script: Path, job: JobRecord) -> str:
    """Submit a job to Slurm, and return its id; also if sbatch has failed after Slurm had taken the job."""
    from primeslurm.slurm import executor

    try:
        return executor.submit(plan, task, script, job.slurm_conf, job.submission)
    except ClusterError as error:
        uncertain = isinstance(error, executor.UncertainSubmissionError)
        until = time.monotonic() + (LATE_JOB_S if uncertain else 0.0)
        while True:
            try:
                found = _taken(job, uncertain)
            except ClusterError as silence:
                if not uncertain:
                    raise error from silence
                if time.monotonic() >= until:
                    why = "whether Slurm has the job is not known, as Slurm does not answer"
                    raise _UnknownError(
                        f"{error}; {why}. `primeslurm status {shlex.quote(plan.run_dir)}` asks again"
                    ) from silence
            else:
                if found is not None:
                    return found
                if time.monotonic() >= until:
                    raise
            time.sleep(_LATE_JOB_POLL_S)


def _taken(job: JobRecord, uncertain: bool) -> str | None:
    """Return the id of the job that Slurm has although sbatch has failed; None if Slurm has no such job."""
    found = find_job(job, ANSWER_S)
    if found is None or uncertain:
        return found
    # Slurm makes the components of a heterogeneous job one by one. If a limit then refuses one of them, or all of
    # them together, Slurm cancels those that it has made, and shows them for some minutes.
    state = SlurmClient(job.slurm_conf, ANSWER_S).job(found)
    return None if state is not None and state.state == "CANCELLED" else found


def _record_excluded(plan: Plan) -> None:
    """Say which bad nodes the job is kept away from, where anything is to be said."""
    run_dir = Path(plan.run_dir)
    bad = [entry for entry in bad_nodes(run_dir.parent, time.time()) if entry.node in plan.job.avoid]
    if bad or excluded(run_dir):
        record_excluded(run_dir, bad)


def bad_nodes(runs: Path, now: float) -> list[BadNode]:
    """List the nodes that jobs of this directory of runs keep away from, newest first. `now`: seconds since 1970."""
    return Ledger(runs).entries(now)


def avoid_bad_nodes(plan: Plan, slurm_conf: str | None) -> Plan:
    """Exclude the ledger's nodes from a plan's job, as far as its partitions can spare them.

    Args:
        plan: of a run in the directory whose ledger counts.
        slurm_conf: SLURM_CONF of the cluster, where it is not the system's own.

    Raises:
        ClusterError: Slurm does not answer.
    """
    now = time.time()
    bad = bad_nodes(Path(plan.run_dir).parent, now)
    if not bad:
        return avoiding(plan, [], now)
    names = {group.partition for group in plan.groups}
    partitions = SlurmClient(slurm_conf).nodes_by_partition(names, plan.job.reservation)
    known = {node for nodes in partitions.values() for node in nodes}
    avoided = spared(plan, bad, partitions)
    needed = [entry for entry in bad if entry.node in known and entry not in avoided]
    return avoiding(plan, avoided, now, needed=needed)


def forget_bad_nodes(runs: Path, hostlists: Sequence[str], now: float, *, every: bool = False) -> list[str]:
    """Let jobs use these nodes again.

    Args:
        runs: directory of the runs whose ledger names them.
        hostlists: names or host lists. Of a host list, at least one node must be in the ledger.
        now: seconds since 1970.
        every: forget all nodes of the ledger.

    Returns:
        The names of the nodes, sorted.

    Raises:
        UsageError: a host list names no node of the ledger; then none is forgotten.
    """
    ledger = Ledger(runs)
    known = [entry.node for entry in ledger.entries(now)]
    nodes, problems = set(known) if every else set[str](), list[Violation]()
    for hostlist in hostlists:
        try:
            named = set(expand(hostlist)) & set(known)
        except ValueError as error:
            problems.append(Violation("--forget", hostlist, str(error), "for example node[001-003],login1"))
            continue
        if not named:
            why = "is not in the ledger of bad nodes"
            problems.append(Violation("--forget", hostlist, why, suggestion(hostlist, known)))
        nodes |= named
    if problems:
        raise UsageError(problems)
    for name in sorted(nodes):
        ledger.forget(name)
    return sorted(nodes)


@dataclass(frozen=True)
class Installed:
    """What nodes have."""

    nodes: Mapping[str, Parts]
    """Version by part, by node. Of a node that runs no jobs now, the only part is `node`, with its state."""
    differences: Sequence[InstalledDifference]

    @property
    def well(self) -> bool:
        """Whether nothing that is required is missing or another version."""
        return not any(each.required for each in self.differences)


def installed(site_file: Path | None, node: str | None = None, *, every: bool = False) -> Installed:
    """Hold what this host, one node, or all nodes of the site have against the lock.

    Args:
        site_file: as of `find_site`; without it, `node` and `every`, this host is no node of a site.
        node: one node of the site, by name.
        every: all nodes of the site.

    Raises:
        UsageError: there is no such node or no site file.
        ClusterError: Slurm does not answer, or nodes are not free within a minute.
    """
    if node is not None and every:
        raise UsageError([Violation("--node", node, "contradicts --all", "keep one of them")])
    site = find_site(site_file) if node or every or site_file else None
    pins = inventory.lock(site.device if site else _device())
    nodes: dict[str, Parts] = {}
    gpu_nodes: list[str] = []
    if site is not None and (node or every):
        nodes |= inventory.on_nodes(site, SlurmClient(site.slurm_conf), node)
        gpu_nodes = _gpu_nodes(site)
    else:
        nodes |= inventory.here()
    return Installed(nodes, inventory.differences(nodes, pins, gpu_nodes))


def _device() -> str:
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def _gpu_nodes(site: Site) -> list[str]:
    if site.device != "cuda":
        return []
    partitions = {kind.partition for kind in site.nodes.values() if kind.gpus}
    return [name for partition in partitions for name in SlurmClient(site.slurm_conf).nodes_of(partition)]
