"""Submission to Slurm through submitit, with the rendered script in place of submitit's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from primeslurm import durable
from primeslurm.errors import ClusterError
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.slurm_syntax import minutes
from primeslurm.slurm.client import require_conf
from primeslurm.slurm.render import submitit_folder

UNLIMITED = 2**31
"""submitit counts timeouts and attempts, and stops requeueing at a limit. The head decides when to stop."""
Agent = Callable[[], object]
"""What runs once per node. With a `checkpoint()` method it is requeued on USR2 to its first task."""


def submit(plan: Plan, agent: Agent, script_path: Path, slurm_conf: str | None) -> str:
    """Submit the rendered script of a Plan. The pickled agent is on disk before, and in place when this returns.

    Args:
        plan: of the job.
        agent: what each node of the job runs.
        script_path: the rendered script.
        slurm_conf: path of the cluster's slurm.conf; None for the one that Slurm finds.

    Returns:
        The job id (the leader's, for a heterogeneous job).

    Raises:
        ClusterError: sbatch refused, with its own words, or the cluster's slurm.conf is gone.
    """
    require_conf(slurm_conf)
    executor = PlanExecutor(plan, script_path, slurm_conf)
    try:
        job_id = str(executor.submit(agent).job_id)
        with contextlib.suppress(OSError):  # the job is taken
            durable.sync(submitit_folder(plan))  # its pickle now has the job's id as its name
        return job_id
    except (FailedJobError, FailedSubmissionError) as error:
        raise ClusterError(f"sbatch refused the job: {str(error).strip() or 'it did not say why'}") from error
    finally:
        remove_submission_files(submitit_folder(plan))


def remove_submission_files(folder: Path) -> None:
    """Remove what submitit hands sbatch and keeps as a link; Slurm has its own copy, the attempt has `job.sbatch`."""
    for path in folder.glob(".submission_file_*.sh"):
        path.unlink(missing_ok=True)


class PlanExecutor(submitit.SlurmExecutor):
    """Submits the script that was rendered from a Plan, instead of submitit's own."""

    def __init__(self, plan: Plan, script_path: Path, slurm_conf: str | None) -> None:
        super().__init__(submitit_folder(plan), max_num_timeout=UNLIMITED)
        self._plan = plan
        self._script_path = script_path
        self._slurm_conf = slurm_conf
        self.update_parameters(time=minutes(plan.job.time))

    def _num_tasks(self) -> int:
        return self._plan.allocated

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script_path.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        durable.sync_tree(self.folder)  # a job that is taken finds its pickle, whatever happens to this machine
        # Slurm prefers a variable SBATCH_PARTITION to a line of the script; what the plan says must count.
        unset = [word for name in sorted(os.environ) if name.startswith("SBATCH_") for word in ("-u", name)]
        conf = [] if self._slurm_conf is None else [f"SLURM_CONF={self._slurm_conf}"]
        return ["env", *unset, *conf, "sbatch", str(submission_file_path)]
