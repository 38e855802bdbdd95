"""End of an attempt: the record, the decision about another attempt, and the nodes that it must avoid."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tenacity import RetryCallState

from primeslurm.base import files
from primeslurm.base.errors import ClusterError, same_error
from primeslurm.node.attempt.controller_commands import requeue
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import EndRecord, newest_attempt
from primeslurm.records.events.nodes import AttemptEnded, BadNodeNotRecorded, EndNotRecorded
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.bad_nodes import BadNode, BadNodeLedger, Partitions, excludable_nodes, excluded, write_excluded
from primeslurm.run.diagnosis.failure_signatures import is_transient
from primeslurm.run.diagnosis.failures import FILE_SYSTEM
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import has_trained
from primeslurm.slurm.client import SlurmClient
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport.retry import retry_in_thread

EXCLUDE_S = 5.0
REQUEUE_S = 5.0  # timeout for Slurm's answer. Slurm kills all processes of an ended job step within half a minute.
FRUITLESS_ATTEMPTS = 3  # a run ends after this many failed attempts without a new committed step


def conclude(plan: Plan, run: RunDirectory, attempt: Attempt, ending: Ending, journal: Journal) -> bool:
    """Record how the attempt ended. Return whether the job must be requeued."""
    step = checkpoints.newest(run.path)
    earlier = [end for a in run.attempts() if a.number < attempt.number and (end := a.end()) is not None]
    ends = [(_failed_itself(end.outcome, end.suspect), end.committed_step) for end in earlier]
    ends.append((_failed_itself(ending.outcome, ending.suspect), step))
    failed = [end for end in earlier if end.outcome == Outcome.FAILED and end.committed_step == step]
    error = lasting_error(ending, attempt)
    again = bool(failed) and same_error(error, failed[-1].error)
    outcomes = [(end.outcome, end.committed_step) for end in earlier]
    free = fruitful_preemptions([*outcomes, (ending.outcome, step)])
    requeue, why_not = should_requeue(
        ending, attempt.number, plan, count_fruitless_attempts(ends), again=again, free=free
    )
    if (newest := newest_attempt(run.path)) > attempt.number:
        requeue, why_not = False, f"attempt {newest} has taken over the run"
    record = EndRecord(
        outcome=ending.outcome,
        reason=ending.reason,
        suspect=ending.suspect,
        committed_step=step,
        requeued=requeue,
        why_not_requeued=why_not,
        time=time.time(),
        error=error,
    )
    try:
        attempt.record_end(record)
    except OSError as error:  # the job must be requeued even if the record cannot be written
        journal.write(EndNotRecorded(str(error)))
    journal.write(AttemptEnded(ending.outcome, requeue, why_not))
    with contextlib.suppress(OSError):
        journal.sync()
    return requeue


def lasting_error(ending: Ending, attempt: Attempt) -> str:
    """Return the error of a failed attempt without progress, without node names, if it may happen again.

    Empty if the attempt has trained a step, was preempted or lost a node, or if the error is transient.
    """
    if ending.outcome is not Outcome.FAILED or not ending.error or is_transient(ending.error) or has_trained(attempt):
        return ""
    with contextlib.suppress(ValueError, OSError):
        names = sorted({report.name for report in attempt.heartbeats()}, key=len, reverse=True)
        return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "NODE", ending.error) if names else ending.error
    return ending.error


def _failed_itself(outcome: str, suspect: str) -> bool:
    return outcome == Outcome.FAILED and suspect != FILE_SYSTEM


def count_fruitless_attempts(ends: Sequence[tuple[bool, int | None]]) -> int:
    """Count the failed attempts after the attempt that committed the newest step. Pure.

    `ends` has, for each attempt in order, whether it failed itself, and the newest committed step by then.
    """
    newest, count = ends[-1][1], 0
    before = [None, *(step for _, step in ends)]
    for (failed, step), earlier in zip(reversed(ends), reversed(before[:-1]), strict=True):
        if not step == earlier == newest:
            break
        count += failed
    return count


def fruitful_preemptions(ends: Sequence[tuple[str, int | None]]) -> int:
    """Count the attempts that committed a step and were ended by Slurm, by preemption or the time limit. Pure.

    `ends` has the outcome of each attempt in order, and the newest committed step by then.
    """
    before = [None, *(step for _, step in ends)]
    pairs = zip(ends, before[:-1], strict=True)
    return sum(outcome == Outcome.PREEMPTED and step != earlier for (outcome, step), earlier in pairs)


def should_requeue(
    ending: Ending, attempt: int, plan: Plan, fruitless: int, *, again: bool, free: int = 0
) -> tuple[bool, str]:
    """Decide whether the job resumes as a new attempt. If it failed and does not resume, also return why. Pure.

    Args:
        ending: how the attempt with number `attempt` ended.
        fruitless: failed attempts without a new committed step, this one included.
        again: the failed attempt before had the same error, and neither made progress.
        free: attempts that do not count, because Slurm ended them after they had committed a step.
    """
    if ending.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
        return False, ""
    if not plan.job.requeue:
        return False, "slurm.requeue is false"
    if attempt - free >= plan.max_attempts:
        uncounted = f", not counting {free} that Slurm ended after they committed a step" if free else ""
        return False, f"this was attempt {attempt - free} of {plan.max_attempts}{uncounted}"
    if ending.final:
        return False, "another attempt would end in the same way"
    if again:
        return False, "the attempt before ended with the same error, and neither made progress"
    if ending.outcome is Outcome.PREEMPTED or ending.suspect == FILE_SYSTEM:
        return True, ""
    if fruitless >= FRUITLESS_ATTEMPTS:
        return False, "three failed attempts in a row committed nothing new"
    return True, ""


def record_bad_node(plan: Plan, attempt: Attempt, node: str, reason: str, journal: Journal) -> None:
    """Add a node to the ledger of all runs. The local executor has no nodes to avoid.

    If the ledger cannot be written, the journal gets an event.
    """
    if plan.executor != "slurm":
        return
    now, ledger, run_dir = time.time(), BadNodeLedger(Path(plan.run_dir).parent), Path(plan.run_dir)
    try:
        # The ledger is outside of the run directory, so it must be named here for its reserve to be used.
        files.writing(
            run_dir, lambda: ledger.record(node, reason, plan.run, attempt.number, now=now, hours=plan.bad_node_hours)
        )
    except OSError as error:
        journal.write(BadNodeNotRecorded(node, str(error)))


def nodes_to_avoid(plan: Plan, partitions: Partitions) -> list[BadNode]:
    return excludable_nodes(plan, BadNodeLedger(Path(plan.run_dir).parent).entries(time.time()), partitions)


def exclude_bad_nodes(plan: Plan, job_id: str) -> None:
    """Exclude the ledger's nodes from a job that was just requeued, in place of the nodes excluded so far."""
    run_dir, client = Path(plan.run_dir), SlurmClient()
    if not excluded(run_dir) and not BadNodeLedger(run_dir.parent).entries(time.time()):
        return

    def exclude() -> list[BadNode]:
        names = {group.partition for group in plan.groups}
        bad = nodes_to_avoid(plan, client.nodes_by_partition(names, plan.job.reservation))
        job = plan.job.model_copy(update={"avoid": tuple(entry.node for entry in bad)})
        client.exclude(job_id, job.excluded or "")
        return bad

    def warn(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        print(f"bad nodes are not excluded from job {job_id} yet: {error}", file=sys.stderr, flush=True)

    # Slurm is ending the step, and its SIGTERM also hits Slurm's commands, so they are retried. Only for a short time:
    # the job does not start again before this process has ended.
    retrying = retry_in_thread(ClusterError, EXCLUDE_S, pause_s=1.0)
    with contextlib.suppress(ClusterError, OSError):
        write_excluded(run_dir, retrying.copy(after=warn)(exclude))


def ensure_requeued(plan: Plan, job_id: str, restarts: int) -> None:
    """After submitit's requeue: requeue the job if that failed, and return once the controller has saved it.

    `restarts` is the number of requeues at the start of the attempt.
    """
    try:
        requeue(SlurmClient(), job_id, restarts)
    except ClusterError as error:
        print(f"job {job_id} may not start again: {error}", file=sys.stderr, flush=True)
    exclude_bad_nodes(plan, job_id)


def is_requeued(job_id: str, restarts: int) -> bool:
    """Return whether Slurm has requeued the job since the attempt began. False without an answer."""
    with contextlib.suppress(ClusterError):
        job = SlurmClient(timeout_s=REQUEUE_S).job(job_id)
        return job is not None and job.active and job.restarts > restarts
    return False


def cancel_requeued(job_id: str) -> None:
    """Cancel a job that Slurm has requeued although its run has ended."""
    try:
        SlurmClient().cancel(job_id)
    except ClusterError as error:
        print(f"job {job_id} starts again although its run is over: {error}", file=sys.stderr, flush=True)


def complete_requeue(plan: Plan, job_id: str, restarts: int) -> None:
    """After Slurm has ended an attempt and requeued the job: requeue all components, and exclude bad nodes.

    A failed node counts against each component of a heterogeneous job. If the leading component has a single node left,
    Slurm requeues that component alone, and ends the others (`Plan.survives_nodes`).

    `restarts` is the number of requeues at the start of the attempt.
    """
    client = SlurmClient()

    def starts_again() -> bool:
        job = client.job(job_id)
        if job is None or not job.active or job.restarts <= restarts:
            return False  # it was cancelled
        if job.broken_up:
            with contextlib.suppress(ClusterError):  # Slurm reports that the pending component is pending already
                client.requeue(job_id)
            job = client.job(job_id)
            if job is not None and job.broken_up:
                raise ClusterError(f"Slurm has requeued one component of job {job_id} alone")
        return True

    try:
        if retry_in_thread(ClusterError, REQUEUE_S, pause_s=0.5)(starts_again):
            exclude_bad_nodes(plan, job_id)
            requeue(client, job_id, restarts)
    except ClusterError as error:
        print(f"job {job_id} may not start again: {error}", file=sys.stderr, flush=True)
