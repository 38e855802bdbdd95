"""The same agents without Slurm: one process per node of the Plan on this machine, through submitit."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import submitit
from submitit.local.local import LocalJob

from primeslurm import durable
from primeslurm.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.slurm_syntax import minutes
from primeslurm.slurm.executor import UNLIMITED, Agent
from primeslurm.slurm.render import LOAD, exports, submitit_folder

_CONTROLLER = "primeslurm.slurm.local.controller"
_EXEC_POLLS, _EXEC_POLL_S = 20, 0.01
"""A process that is just being started has an empty command line for a moment, one that has ended keeps it empty."""


def submit_local(plan: Plan, agent: Agent) -> str:
    """Start a Plan's agents and return the job id, which is the pid of their controller.

    The controller outlives the caller, starts the agents again after a checkpoint, and ends an attempt at the recipe's
    time. Its own messages are in `submitit/controller.log` of the run, those of the agents beside it. Modules and
    prologue of the site are for batch scripts and not run here.
    """
    return str(PlanLocalExecutor(plan).submit(agent).job_id)


def is_running(plan: Plan, job_id: str) -> bool:
    """Whether the controller of this run still runs; false for a later process with the same pid."""
    argv = _argv(int(job_id))
    return _CONTROLLER in argv and str(submitit_folder(plan)) in argv


def _argv(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for _ in range(_EXEC_POLLS):
            if argv := process.cmdline():
                return list(argv)
            time.sleep(_EXEC_POLL_S)
    return []


def cancel(plan: Plan, job_id: str) -> None:
    """Ask the controller of a run to end its agents and itself.

    Raises:
        RunError: it does not run.
    """
    if not is_running(plan, job_id):
        raise RunError(f"run {plan.run}: its local job {job_id} does not run")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(job_id), signal.SIGTERM)


class PlanLocalExecutor(submitit.LocalExecutor):
    """Runs a Plan's agents as tasks of one local job under our own controller."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(submitit_folder(plan), max_num_timeout=UNLIMITED, python=shlex.quote(plan.python))
        self._plan = plan
        self.update_parameters(timeout_min=minutes(plan.job.time), tasks_per_node=plan.allocated)

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m {LOAD} {shlex.quote(str(self.folder))}"

    def _libraries(self) -> dict[str, str]:
        """LD_LIBRARY_PATH as the batch script would set it."""
        inherited = [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
        found = [*self._plan.library_path, *inherited]
        return {"LD_LIBRARY_PATH": ":".join(found)} if found else {}

    def _submit_command(self, command: str) -> LocalJob[Any]:
        durable.sync_tree(self.folder)
        tasks = self._num_tasks()
        environment = {
            **os.environ,
            **exports(self._plan),
            **self._libraries(),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self._plan.job.signal_s),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        argv = [sys.executable, "-m", _CONTROLLER, str(self.folder), str(UNLIMITED)]
        with (self.folder / "controller.log").open("ab") as log:
            # Its own session: closing the terminal, or Ctrl-C in it, does not reach the run.
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return LocalJob(self.folder, str(process.pid), tasks=list(range(tasks)), process=process)
