"""Submit a Plan: sbatch gets the rendered script, and the pickled agent of submitit starts on the nodes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from submitit.helpers import DelayedSubmission

from primeslurm.base import durable
from primeslurm.base.errors import ClusterError
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.types import minutes
from primeslurm.records.attempt import pickled_agent
from primeslurm.slurm.client import require_conf
from primeslurm.slurm.environment import inherited_by_jobs
from primeslurm.slurm.render import submitit_folder

# submitit limits timeouts and attempts. Here the head decides when to stop.
UNLIMITED = 2**31
# Callable that runs once per node. If it has `checkpoint()`, USR2 to its first task requeues the job.
Agent = Callable[[], object]
# Longest wait for sbatch [s]. sbatch itself retries for minutes while the controller is busy.
SBATCH_S = 600.0
# The second form is the output of a wrapper that adds `--parsable`
_JOB = re.compile(r"Submitted batch job (\d+)|^(\d+)(?:;\S+)?$", re.MULTILINE)
# Messages of sbatch if a request or its answer was lost, so Slurm may have the job
_UNCERTAIN = re.compile(r"(?i)timed? ?out|unable to contact|communication|connection|socket|zero bytes|transmitted")


class UncertainSubmissionError(ClusterError):
    """sbatch failed without saying whether Slurm has the job."""


def submit(plan: Plan, agent: Agent, script_path: Path, slurm_conf: str | None, submission: str) -> str:
    """Submit the rendered script of a Plan, after its pickled agent is on disk. Return the id of the (leading) job.

    `submission` is a unique word by which `SlurmClient.find` finds the job.

    Raises:
        UncertainSubmissionError: sbatch failed, but Slurm may have the job.
        ClusterError: sbatch refused the job, or slurm.conf is missing.
    """
    require_conf(slurm_conf)
    write_pickle(plan, agent, submission)
    # The word of the submission is the comment, unless the recipe has one.
    comment = [] if plan.job.comment else [f"--comment=primeslurm {submission}"]
    command = [*_sbatch(plan, slurm_conf), *comment, str(script_path), submission]
    try:
        # A new session, so that Ctrl-C or a closed terminal does not end sbatch before it prints the job id.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise UncertainSubmissionError(f"sbatch gave no answer within {SBATCH_S:.0f} s") from error
    words = done.stderr.strip()
    if done.returncode == 0 and (job := _JOB.search(done.stdout)):
        return job[1] or job[2]
    refused = f"sbatch refused the job: {words or 'it gave no reason'}"
    if done.returncode > 0 and not _UNCERTAIN.search(words):
        raise ClusterError(refused)
    answer = words or done.stdout.strip() or f"exit code {done.returncode}"
    raise UncertainSubmissionError(f"sbatch did not say which job it has submitted: {answer}")


def write_pickle(plan: Plan, agent: Agent, submission: str) -> None:
    """Write the pickled agent of a submission. On return it is on disk."""
    folder = submitit_folder(plan)
    durable.make_directory(folder)
    # A new Slurm may give this job the number of an ended one, whose pickle the job would load.
    for ended in folder.glob("*_submitted.pkl"):
        ended.unlink(missing_ok=True)
    delayed = DelayedSubmission(agent)
    delayed.set_timeout(minutes(plan.job.time), UNLIMITED)
    pickle = pickled_agent(folder, submission)
    delayed.dump(pickle)
    durable.sync(pickle)
    durable.sync(folder)


def _sbatch(plan: Plan, slurm_conf: str | None) -> list[str]:
    # sbatch prefers SBATCH_PARTITION to the script's option, and passes this shell's SLURM_* to the job's srun.
    foreign = inherited_by_jobs(os.environ.keys() - set(plan.pass_env))
    unset = [word for name in foreign for word in ("-u", name)]
    conf = [] if slurm_conf is None else [f"SLURM_CONF={slurm_conf}"]
    return ["env", *unset, *conf, "sbatch"]
