"""After a step that failed, in the batch script: `python -m primeslurm.node.aftermath RUN_DIR CODE`.

Usually the head has recorded how the attempt ended. It cannot where no head was there to do so: srun ends all tasks
when it cannot reach a single node to start one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from primeslurm.errors import ClusterError, RunError
from primeslurm.node.attempts import enter, first_of_job
from primeslurm.node.conclusion import conclude, keep_away_from_bad_nodes, remember_bad_node
from primeslurm.node.reports import Ending, Outcome
from primeslurm.run.directory import EndRecord, RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.launch import launch_failures, node_names, restarts
from primeslurm.wire.journal import Journal


def ending_of_step(end: EndRecord | None, job_state: str, code: int, unreached: dict[str, str]) -> Ending | None:
    """How the attempt has ended, if nobody else says so and Slurm is not about to end or requeue the job. Pure.

    Args:
        end: what the head has recorded.
        job_state: Slurm's word for the job.
        code: srun's exit code.
        unreached: nodes on which it could not start a task, and why.
    """
    if end is not None or job_state != "RUNNING":
        return None
    if unreached:
        name, why = next(iter(unreached.items()))
        more = f", nor on {len(unreached) - 1} more" if len(unreached) > 1 else ""
        return Ending(Outcome.FAILED, f"node {name}: no agent could be started ({why}){more}", name)
    return Ending(Outcome.FAILED, f"srun ended with exit code {code}, and no agent has said why", "job")


def main(run_dir: str, code: int) -> None:
    """Record the end of an attempt that has ended without a word, and requeue its job as after any other failure.

    Raises ClusterError, RunError.
    """
    job_id, start = os.environ["SLURM_JOB_ID"], restarts(os.environ)
    run, client = RunDirectory(Path(run_dir)), SlurmClient()
    attempt = enter(run, first_of_job(run, job_id) + start, wait_s=0.0)
    job = client.job(job_id)
    unreached = launch_failures(run.job_output(job_id).read_text(errors="replace"), start)
    ending = ending_of_step(attempt.end(), job.state if job else "", code, unreached)
    if ending is None:
        return
    plan, journal = attempt.plan(), Journal(attempt.path, "batch")
    names = node_names(plan, os.environ)
    if len(unreached) < len(names):  # what befalls all of them is no node's fault
        for name, why in unreached.items():
            reason = f"no agent could be started: {why}"
            rank = names.index(name) if name in names else None
            journal.event("node_lost", node=name, rank=rank, reason=reason)
            remember_bad_node(plan, attempt, name, reason, journal)
    journal.event("ending", outcome=ending.outcome, reason=ending.reason, suspect=ending.suspect)
    if conclude(plan, run, attempt, ending, journal):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this script as well, but not at once
        client.requeue(job_id)
        keep_away_from_bad_nodes(plan, job_id)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except (ClusterError, RunError, OSError) as error:
        print(f"primeslurm: {error}", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
