"""Run by the batch script if a command of the site's set-up (`modules`, `prologue`) failed.

    python -m primeslurm.node.attempt.setup_failure RUN_DIR SUBMISSION CODE COMMAND

Records the end of the attempt with the output of that command. The job is not requeued, because the next start would
run the same commands.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from primeslurm.base.errors import ClusterError, RunError
from primeslurm.node.attempt.attempt_end import conclude
from primeslurm.node.attempt.attempt_start import enter, this_start
from primeslurm.records.events.nodes import AttemptEnds
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.launch_failures import JobOutput

SUSPECT = "site set-up"
MAX_LINES = 3
MAX_CHARACTERS = 600


def ending_of_setup(code: int, command: str, output: str) -> Ending:
    """Return the ending of the attempt. The job's output ends with the output of the failed command. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("primeslurm: ")]
    tail = "; ".join(lines[-MAX_LINES:])[-MAX_CHARACTERS:]
    reason = f"a command of the site's set-up failed: {command} (exit code {code})" + (f": {tail}" if tail else "")
    return Ending(Outcome.FAILED, reason, SUSPECT, final=True)


def record(run: RunDirectory, submission: str, code: int, command: str) -> None:
    """Record the end of this job's attempt, unless Slurm is ending the job.

    Raises:
        ClusterError: Slurm does not answer.
        RunError: the run belongs to another job, has no attempt, or none with a readable Plan.
        OSError: the run directory cannot be read or written.
    """
    job_id = os.environ["SLURM_JOB_ID"]
    start = this_start(os.environ, job_id)
    job = SlurmClient().job(job_id)
    attempt = enter(run, submission, start, wait_s=0.0)
    if job is None or job.state != "RUNNING" or attempt.end() is not None:
        return
    ending = ending_of_setup(code, command, JobOutput(run.job_output(job_id), start.word).news())
    journal = Journal(attempt.path, "batch")
    journal.write(AttemptEnds(ending.outcome, ending.reason, ending.suspect))
    conclude(attempt.plan(), run, attempt, ending, journal)


def main(run_dir: str, submission: str, code: str, command: str) -> int:
    try:
        record(RunDirectory(Path(run_dir)), submission, int(code), command)
    except (ClusterError, RunError, OSError) as error:
        print(f"primeslurm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
