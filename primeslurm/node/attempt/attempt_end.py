"""The end of an attempt: whether another one follows, what is put on record, and what the next one has to know."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tenacity import RetryCallState

from primeslurm.base.errors import ClusterError, same_error
from primeslurm.node.attempt.controller_commands import requeue
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import EndRecord, newest_attempt
from primeslurm.records.events.nodes import AttemptEnded, BadNodeNotRecorded, EndNotRecorded
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.records.reserve import Reserve
from primeslurm.run.diagnosis.failure_signatures import is_transient
from primeslurm.run.diagnosis.failures import FILE_SYSTEM
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.exclusion import Partitions, excluded, record_excluded, spared
from primeslurm.run.ledger import BadNode, Ledger
from primeslurm.run.records import trained_of
from primeslurm.slurm.client import SlurmClient
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport.retry import retry_in_thread

EXCLUDE_S = 5.0
REQUEUE_S = 5.0
"""For Slurm to answer: it kills what has not ended in the half minute since it asked for that."""
FRUITLESS_ATTEMPTS = 3
"""Failed attempts without a new committed step, after which a run ends."""


def conclude(plan: Plan, run: RunDirectory, attempt: Attempt, ending: Ending, journal: Journal) -> bool:
    """Record how the attempt ended.

    Args:
        plan: of the attempt.
        run: whose earlier attempts and checkpoints say whether another try makes sense.
        attempt: the one that ended.
        ending: how and why it ended.
        journal: of whoever puts it on record.

    Returns:
        Whether the job should be requeued.
    """
    step = checkpoints.newest(run.path)
    known = [end for a in run.attempts() if a.number < attempt.number and (end := a.end()) is not None]
    ends = [(_failed_itself(end.outcome, end.suspect), end.committed_step) for end in known]
    ends.append((_failed_itself(ending.outcome, ending.suspect), step))
    failed = [end for end in known if end.outcome == Outcome.FAILED and end.committed_step == step]
    error = lasting_error(ending, attempt)
    again = bool(failed) and same_error(error, failed[-1].error)
    outcomes = [(end.outcome, end.committed_step) for end in known]
    free = fruitful_preemptions([*outcomes, (ending.outcome, step)])
    requeue, why_not = should_requeue(ending, attempt.number, plan, fruitless(ends), again=again, free=free)
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
    reserve = Reserve(run.path)
    try:
        reserve.spend_on(lambda: attempt.record_end(record))
    except OSError as error:  # a full disk must not keep the job from being requeued
        journal.write(EndNotRecorded(str(error)))
    journal.write(AttemptEnded(ending.outcome, requeue, why_not))
    with contextlib.suppress(OSError):
        journal.sync()
    return requeue


def lasting_error(ending: Ending, attempt: Attempt) -> str:
    """Return the error of an attempt that has made no progress, unless another attempt may be free of the error.

    Args:
        ending: of the attempt.
        attempt: which one.

    Returns:
        The message, without names of nodes; empty if the attempt has trained a step, was preempted, or lost a node.
    """
    if ending.outcome is not Outcome.FAILED or not ending.error or is_transient(ending.error) or trained_of(attempt):
        return ""
    with contextlib.suppress(ValueError, OSError):
        names = sorted({report.name for report in attempt.heartbeats()}, key=len, reverse=True)
        return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "NODE", ending.error) if names else ending.error
    return ending.error


def _failed_itself(outcome: str, suspect: str) -> bool:
    """Whether an attempt failed, and not for a fault of the file system."""
    return outcome == Outcome.FAILED and suspect != FILE_SYSTEM


def fruitless(ends: Sequence[tuple[bool, int | None]]) -> int:
    """Count the failed attempts since the newest committed step, not the one that committed it. Pure.

    Args:
        ends: of all attempts, in order: whether it failed by itself, and the newest committed step by then.
    """
    newest, count = ends[-1][1], 0
    before = [None, *(step for _, step in ends)]
    for (failed, step), earlier in zip(reversed(ends), reversed(before[:-1]), strict=True):
        if not step == earlier == newest:
            break
        count += failed
    return count


def fruitful_preemptions(ends: Sequence[tuple[str, int | None]]) -> int:
    """Count the attempts that Slurm ended, by preemption or the time limit, after they had committed a step. Pure.

    Args:
        ends: of all attempts, in order: the outcome, and the newest committed step by then.
    """
    before = [None, *(step for _, step in ends)]
    pairs = zip(ends, before[:-1], strict=True)
    return sum(outcome == Outcome.PREEMPTED and step != earlier for (outcome, step), earlier in pairs)


def should_requeue(
    ending: Ending, attempt: int, plan: Plan, fruitless: int, *, again: bool, free: int = 0
) -> tuple[bool, str]:
    """Decide whether the job resumes as a new attempt. Pure.

    Args:
        ending: how the attempt ended.
        attempt: its number.
        plan: of the attempt.
        fruitless: failed attempts that have committed nothing new, this one included.
        again: the failed attempt before ended with the same error, and neither has made progress.
        free: attempts that do not count: Slurm ended them after they had committed a step.

    Returns:
        The decision, and why not if the job does not resume though it failed.
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
    """Put a node into the ledger of all runs. Nodes of the local executor are this one machine, and are left out.

    Args:
        plan: of the attempt; it says for how long the node is avoided.
        attempt: in which the node failed.
        node: its name, in Slurm's words.
        reason: what was wrong with it.
        journal: gets an event if the ledger cannot be written.
    """
    if plan.executor != "slurm":
        return
    now = time.time()
    ledger = Ledger(Path(plan.run_dir).parent)
    try:
        Reserve(Path(plan.run_dir)).spend_on(
            lambda: ledger.record(node, reason, plan.run, attempt.number, now=now, hours=plan.bad_node_hours)
        )
    except OSError as error:
        journal.write(BadNodeNotRecorded(node, str(error)))


def nodes_to_avoid(plan: Plan, partitions: Partitions) -> list[BadNode]:
    """Choose the ledger's nodes that the next attempt must not get, as far as the job can do without them."""
    return spared(plan, Ledger(Path(plan.run_dir).parent).entries(time.time()), partitions)


def exclude_bad_nodes(plan: Plan, job_id: str) -> None:
    """Tell Slurm which nodes a job that was just requeued must not get, in place of those that it must not get so far.

    More than one try: Slurm ends the step meanwhile, and its SIGTERM meets its commands as well. Not for long: the job
    does not start again before this process has ended.
    """
    run_dir, client = Path(plan.run_dir), SlurmClient()
    if not excluded(run_dir) and not Ledger(run_dir.parent).entries(time.time()):
        return

    def exclude() -> list[BadNode]:
        names = {group.partition for group in plan.groups}
        bad = nodes_to_avoid(plan, client.nodes_by_partition(names, plan.job.reservation))
        job = plan.job.model_copy(update={"avoid": tuple(entry.node for entry in bad)})
        client.exclude(job_id, job.excluded or "")
        return bad

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        print(f"job {job_id} is not kept away from bad nodes yet: {error}", file=sys.stderr, flush=True)

    again = retry_in_thread(ClusterError, EXCLUDE_S, pause_s=1.0)
    with contextlib.suppress(ClusterError, OSError):
        record_excluded(run_dir, again.copy(after=tell)(exclude))


def see_requeued(plan: Plan, job_id: str, restarts: int) -> None:
    """After submitit has requeued the job, or could not: stay until the controller cannot forget that any more.

    Args:
        plan: of the attempt.
        job_id: the job's.
        restarts: how often Slurm had requeued the job when the attempt began.
    """
    try:
        requeue(SlurmClient(), job_id, restarts)
    except ClusterError as error:
        print(f"job {job_id} may not start again: {error}", file=sys.stderr, flush=True)
    exclude_bad_nodes(plan, job_id)


def is_requeued(job_id: str, restarts: int) -> bool:
    """Tell whether Slurm has put the job back into the queue since the attempt began. False: no, or no answer."""
    with contextlib.suppress(ClusterError):
        job = SlurmClient(timeout_s=REQUEUE_S).job(job_id)
        return job is not None and job.active and job.restarts > restarts
    return False


def end_for_good(job_id: str) -> None:
    """Cancel a job that Slurm has requeued although its run is over."""
    try:
        SlurmClient().cancel(job_id)
    except ClusterError as error:
        print(f"job {job_id} starts again although its run is over: {error}", file=sys.stderr, flush=True)


def complete_requeue(plan: Plan, job_id: str, restarts: int) -> None:
    """After Slurm has ended an attempt: if it starts the job again, have it start whole, and away from bad nodes.

    A node that fails is counted against each component of a heterogeneous job. The leading one is requeued alone if it
    has a single node left, and the others are ended (`Plan.survives_nodes`).

    Args:
        plan: of the attempt.
        job_id: the job's.
        restarts: how often Slurm had requeued the job when the attempt began.
    """
    client = SlurmClient()

    def starts_again() -> bool:
        job = client.job(job_id)
        if job is None or not job.active or job.restarts <= restarts:
            return False  # it was cancelled
        if job.broken_up:
            with contextlib.suppress(ClusterError):  # of the component that waits it says that it does
                client.requeue(job_id)
            again = client.job(job_id)
            if again is not None and again.broken_up:
                raise ClusterError(f"Slurm has requeued one component of job {job_id} alone")
        return True

    try:
        if retry_in_thread(ClusterError, REQUEUE_S, pause_s=0.5)(starts_again):
            exclude_bad_nodes(plan, job_id)
            requeue(client, job_id, restarts)
    except ClusterError as error:
        print(f"job {job_id} may not start again: {error}", file=sys.stderr, flush=True)
