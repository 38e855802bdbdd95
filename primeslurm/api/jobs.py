"""Query and end a run's job in Slurm, or its local process."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from primeslurm.base import files
from primeslurm.base.errors import ClusterError, RunError
from primeslurm.base.hostlists import expand
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import JobRecord, Obstacle
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.status.liveness import FindCauses
from primeslurm.run.status.run_status import BROKEN_UP, NO_ANSWER, SRUN_REPORTS, SUBMITTING, FindObstacles, JobQuery
from primeslurm.slurm import pending_reasons
from primeslurm.slurm.client import TIMEOUT_S, NodeState, SlurmClient
from primeslurm.slurm.launch_failures import ended_tasks

# Called if Slurm does not answer.
OnNoAnswer = Callable[[ClusterError], None]
# Timeout for Slurm [s] in commands that only show a run.
ANSWER_S = 8.0
_ELSEWHERE = "and this host cannot see its processes. If that host is lost, give the run up with `primeslurm cancel`"
# Age up to which a submission from another host may still be in progress [s].
SUBMISSION_S = 900.0
# Bytes read from the end of a job's output.
_OUTPUT_BYTES = 1 << 20


def job_query(run: RunDirectory, if_silent: OnNoAnswer | None = None) -> JobQuery:
    """Return a function that queries the state of a job of this run.

    If Slurm does not answer within `ANSWER_S`, `if_silent` is called and the state is `NO_ANSWER`. Without `if_silent`,
    the query waits up to a minute and raises ClusterError.
    """
    return queries(run, if_silent)[0]


def queries(run: RunDirectory, if_silent: OnNoAnswer | None = None) -> tuple[JobQuery, FindCauses, FindObstacles]:
    """Return functions that query a job's state, its unresponsive nodes, and why a pending job does not start."""
    # After one timeout, the other queries do not wait for Slurm again.
    timeout_s = None if if_silent is None else ANSWER_S
    timeouts: list[ClusterError] = []
    try:
        record_interrupted_submission(run, timeout_s)
    except ClusterError as error:
        if if_silent is None:
            raise
        timeouts.append(error)

    def query_state(job: JobRecord) -> str | None:
        if timeouts and if_silent is not None:
            if_silent(timeouts[0])
            return NO_ANSWER
        try:
            return _state(run, job, timeout_s) if job.job_id else _state_without_id(job)
        except ClusterError as error:
            if if_silent is None:
                raise
            timeouts.append(error)
            if_silent(error)
            return NO_ANSWER

    def find_causes(attempt: Attempt, nodes: Sequence[str]) -> list[str]:
        job = attempt.job()
        if job is None or job.executor != "slurm":
            return []
        ended = ended_tasks(_end_of(run.job_output(job.job_id)))
        causes = [f"{SRUN_REPORTS} about the task on {name}: {ended[name]}" for name in nodes if name in ended]
        try:
            states = {node.name: node for node in SlurmClient(job.slurm_conf, ANSWER_S).nodes()}
        except ClusterError as error:
            timeouts.append(error)
            return [*causes, f"Slurm does not answer: {error}"]
        return causes + [problem for name in nodes if name in states and (problem := _node_problem(states[name]))]

    def find_obstacles(job: JobRecord) -> list[Obstacle]:
        if job.executor != "slurm" or timeouts:
            return []
        try:
            return _obstacles(run, SlurmClient(job.slurm_conf, timeout_s or TIMEOUT_S), job.job_id)
        except ClusterError:  # the query of the state reports it
            return []

    return query_state, find_causes, find_obstacles


def looking_query(run: RunDirectory) -> JobQuery:
    """Return a function that queries the state of a job of this run, like `job_query`, and never writes a file.

    It raises ClusterError if Slurm does not answer within `ANSWER_S`.
    """
    return lambda job: _state(run, job, ANSWER_S) if job.job_id else _state_without_id(job)


def _obstacles(run: RunDirectory, client: SlurmClient, job_id: str) -> list[Obstacle]:
    job = client.job(job_id)
    if job is None or job.state != "PENDING":
        return []
    maintenance = []
    if pending_reasons.is_reserved(job):
        nodes = {node for component in job.components for node in client.nodes_of(component.partition)}
        reserved = [each for each in client.reservations() if each.maintenance]
        maintenance = [each for each in reserved if not each.nodes or nodes & set(expand(each.nodes))]
    rivals = client.rivals(job) if pending_reasons.depends_on_others(job) else ()
    return pending_reasons.obstacles(job, _component_names(run), maintenance, rivals)


def _component_names(run: RunDirectory) -> dict[int, str]:
    return {group.index: group.name for group in run.latest().plan().groups}


def _node_problem(node: NodeState) -> str:
    if node.responding and not node.state.startswith(("down", "drain", "drng", "fail")):
        return ""
    unresponsive, reason = "" if node.responding else ", not responding", f" ({node.reason})" if node.reason else ""
    return f"Slurm reports that {node.name} is {node.state}{unresponsive}{reason}"


def _end_of(path: Path) -> str:
    def read(handle: BinaryIO) -> str:
        handle.seek(max(0, handle.seek(0, 2) - _OUTPUT_BYTES))
        return handle.read().decode(errors="replace")

    try:
        return files.reading(path, read)
    except OSError:
        return ""


def record_interrupted_submission(run: RunDirectory, timeout_s: float | None = None) -> None:
    """Record the job's id if the submission was interrupted after Slurm had accepted the job. Raises ClusterError."""
    attempts = run.attempts()
    job = attempts[-1].job() if attempts else None
    if job is None or job.job_id or not job.submission:
        return
    start = attempts[-1].start()
    job_id = start.job_id if start is not None else find_job(job, timeout_s)
    if job_id:
        with contextlib.suppress(OSError):  # without write permission, the next call finds it again
            attempts[-1].record_job(msgspec.structs.replace(job, job_id=job_id))


def find_job(job: JobRecord, timeout_s: float | None = None) -> str | None:
    """Return the id of a job whose submission got no answer; None if Slurm does not have it. Raises ClusterError."""
    if job.executor == "local":
        from primeslurm.slurm.local import submit

        return submit.find(job.submission)
    if job.slurm_conf is not None and not files.is_file(Path(job.slurm_conf)):
        return None  # an embedded cluster that is down has no jobs
    return SlurmClient(job.slurm_conf, timeout_s or TIMEOUT_S).find(job.submission, job.submitted_at)


def _state_without_id(job: JobRecord) -> str | None:
    # Slurm does not have the job (yet). The submitting process may still be waiting for sbatch.
    from primeslurm.slurm.local import submit

    if job.host != socket.gethostname():
        elsewhere = job.pid and abs(time.time() - job.submitted_at) < SUBMISSION_S
        return f"{SUBMITTING} on {job.host}" if elsewhere else None
    with contextlib.suppress(psutil.Error):
        # A later process with the same pid was created later.
        if job.pid and psutil.Process(job.pid).create_time() <= job.submitted_at + 1.0:
            return f"{SUBMITTING} by process {job.pid}"
    return f"{SUBMITTING}, sbatch has not answered" if submit.being_submitted(job.submission) else None


def end_job(plan: Plan, job: JobRecord) -> None:
    """Cancel a job that has not ended. Raises ClusterError."""
    if not job.job_id:
        return
    if job.executor == "slurm":
        client = SlurmClient(job.slurm_conf)
        state = client.job(job.job_id)
        if state is not None and state.active:
            client.cancel(job.job_id)
        return
    from primeslurm.slurm.local import submit

    with contextlib.suppress(RunError):  # it has already ended
        submit.cancel(plan, job.job_id)


def _state(run: RunDirectory, job: JobRecord, timeout_s: float | None) -> str | None:
    if job.executor == "local":
        from primeslurm.slurm.local import submit

        attempt = run.latest()
        if job.host not in ("", socket.gethostname()):
            # This host cannot see the processes. `cancel` gives the run up if their host is lost.
            return None if files.exists(attempt.cancel_file) else f"RUNNING on {job.host}, {_ELSEWHERE}"
        return "RUNNING" if submit.is_running(attempt.plan(), job.job_id) else None
    if job.slurm_conf is not None and not files.is_file(Path(job.slurm_conf)):
        return None  # an embedded cluster that is down has no jobs
    state = SlurmClient(job.slurm_conf, timeout_s or TIMEOUT_S).job(job.job_id)
    if state is None:
        return None
    if state.state != "PENDING":
        return state.state
    reasons = pending_reasons.pending_reason(state, _component_names(run))
    parts = [reasons] * bool(reasons) + [BROKEN_UP] * state.broken_up
    return f"PENDING ({', '.join(parts)})" if parts else "PENDING"
