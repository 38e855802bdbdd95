"""Start, find and cancel a run without Slurm: one process per node of the Plan on this machine, through submitit."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from primeslurm.base.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.types import minutes
from primeslurm.slurm.environment import ALLOCATION_TIMES, clean, gpus_given
from primeslurm.slurm.executor import UNLIMITED, Agent, write_pickle
from primeslurm.slurm.render import AGENT_MODULE, exports, submitit_folder

_CONTROLLER = "primeslurm.slurm.local.controller"
# A process has an empty command line for a moment while it starts, and for good after it has ended
_EXEC_POLLS, _EXEC_POLL_S = 20, 0.01


def submit_local(plan: Plan, agent: Agent, submission: str) -> str:
    """Start a Plan's agents and return the job id: the pid of their controller.

    The controller outlives the caller, restarts the agents after a checkpoint, and ends an attempt at the recipe's time
    limit. Inside a Slurm allocation, the run ends with a checkpoint before the allocation does, and `resume` continues
    it. Logs of the controller and the agents are in `submitit/` of the run. The site's modules and prologue are for
    batch scripts and do not run here.

    Args:
        submission: unique word by which `find` finds the controller.
    """
    write_pickle(plan, agent, submission)
    folder = submitit_folder(plan)
    gpus = gpus_given(os.environ)
    command = [plan.python, "-u", "-m", AGENT_MODULE, str(folder), submission]
    environment = {
        **clean(os.environ),  # otherwise agents would behave as tasks of this shell's allocation
        **{name: os.environ[name] for name in ALLOCATION_TIMES if name in os.environ},
        **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}),
        **exports(plan),
        **_libraries(plan),
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": shlex.join(command),
        "SUBMITIT_LOCAL_NTASKS": str(plan.allocated),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * minutes(plan.job.time)),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(plan.job.signal_s),
        "SUBMITIT_LOCAL_WITH_SHELL": "",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
    }
    argv = [sys.executable, "-m", _CONTROLLER, str(folder), str(UNLIMITED), submission]
    with (folder / "controller.log").open("ab") as log:
        # A new session, so that Ctrl-C or a closed terminal does not reach the run.
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return str(process.pid)


def _libraries(plan: Plan) -> dict[str, str]:
    inherited = [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
    paths = [*plan.library_path, *inherited]
    return {"LD_LIBRARY_PATH": ":".join(paths)} if paths else {}


def find(submission: str) -> str | None:
    """Return the pid of the controller of a submission; None if none runs on this host."""
    return next((str(pid) for pid, argv in _processes() if _CONTROLLER in argv and submission in argv), None)


def being_submitted(submission: str) -> bool:
    """Return whether a process of this host, such as sbatch, has the word of a submission in its arguments."""
    return any(submission in word for _, argv in _processes() for word in argv)


def _processes() -> Iterator[tuple[int, list[str]]]:
    for process in psutil.process_iter(["cmdline"]):
        yield process.pid, process.info["cmdline"] or []


def is_running(plan: Plan, job_id: str) -> bool:
    """Return whether the controller of this run still runs; false for a later process with the same pid."""
    argv = _argv(int(job_id))
    return _CONTROLLER in argv and str(submitit_folder(plan)) in argv


def _argv(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for _ in range(_EXEC_POLLS):
            if argv := process.cmdline():
                return list(argv)
            time.sleep(_EXEC_POLL_S)
    return []


def cancel(plan: Plan, job_id: str) -> None:
    """Tell the controller of a run to end its agents and itself. Raises RunError if it does not run."""
    if not is_running(plan, job_id):
        raise RunError(f"run {plan.run}: its local job {job_id} does not run")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(job_id), signal.SIGTERM)
