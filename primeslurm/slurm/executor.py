"""Submission through submitit: the rendered script to Slurm, or the same agents as local processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LocalJob

from primeslurm.errors import ClusterError
from primeslurm.plan.model import Plan
from primeslurm.recipe.scheduling import minutes
from primeslurm.slurm.render import exports, submitit_folder

Agent = Callable[[], object]
"""What runs once per node. With a `checkpoint()` method it is requeued on USR2 to its first task."""


def submit(plan: Plan, agent: Agent, script_path: Path, slurm_conf: str | None) -> str:
    """Submit the rendered script of a Plan and return the job id (the leader's, for a heterogeneous job).

    The pickled agent is in place when this returns. Raises ClusterError with sbatch's own words if it refuses.
    """
    executor = PlanExecutor(plan, script_path, slurm_conf)
    try:
        return str(executor.submit(agent).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        raise ClusterError(f"sbatch refused the job: {error}") from error


def submit_local(plan: Plan, agent: Agent) -> str:
    """Start a Plan's agents on this machine, one process per node of the Plan, and return the controller's pid.

    The controller outlives the caller, starts the agents again after a checkpoint, and ends at the recipe's time.
    SIGTERM to it ends the run: it is passed on to the agents, which then have to end.
    """
    return str(PlanLocalExecutor(plan).submit(agent).job_id)


class PlanExecutor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """Submits the script that was rendered from a Plan, instead of submitit's own."""

    def __init__(self, plan: Plan, script_path: Path, slurm_conf: str | None) -> None:
        # submitit counts time-outs down and then stops requeueing. The agent decides when to stop, so that count must
        # not reach its end first.
        super().__init__(submitit_folder(plan), max_num_timeout=plan.max_attempts)
        self._plan = plan
        self._script_path = script_path
        self._slurm_conf = slurm_conf
        self.update_parameters(time=minutes(plan.job.time))

    def _num_tasks(self) -> int:
        return len(self._plan.nodes)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script_path.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        prefix = [] if self._slurm_conf is None else ["env", f"SLURM_CONF={self._slurm_conf}"]
        return [*prefix, "sbatch", str(submission_file_path)]


class PlanLocalExecutor(submitit.LocalExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """Runs a Plan's agents as tasks of one local job under `local_controller`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(submitit_folder(plan), max_num_timeout=plan.max_attempts, python=shlex.quote(plan.python))
        self._plan = plan
        self.update_parameters(
            timeout_min=minutes(plan.job.time), tasks_per_node=len(plan.nodes), signal_delay_s=plan.job.signal_s
        )

    def _submit_command(self, command: str) -> LocalJob:
        tasks = self._num_tasks()
        environment = {
            **os.environ,
            **exports(self._plan),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        argv = [sys.executable, "-m", "primeslurm.slurm.local_controller", str(self.folder)]
        argv.append(str(self._plan.max_attempts))
        with (self.folder / "controller.log").open("ab") as log:
            # Its own session: closing the terminal, or Ctrl-C in it, does not reach the run.
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return LocalJob(self.folder, str(process.pid), tasks=list(range(tasks)), process=process)
