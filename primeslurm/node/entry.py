"""What submitit runs on every node of the job: one `AgentTask` a node, the same pickled object everywhere."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import submitit
from submitit.helpers import DelayedSubmission

from primeslurm.base import durable, files
from primeslurm.node.agent.node_agent import NodeAgent
from primeslurm.node.attempt.attempt_end import (
    complete_requeue,
    conclude,
    end_for_good,
    exclude_bad_nodes,
    is_requeued,
    record_bad_node,
    see_requeued,
)
from primeslurm.node.attempt.attempt_start import PLAN_WAIT_S, enter, this_start
from primeslurm.node.attempt.controller_commands import insist, requeue
from primeslurm.plan.model import Plan
from primeslurm.run.claims import NotOwnerError
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.launch_failures import node_names, restarts

if TYPE_CHECKING:
    from primeslurm.node.head.head import Head

DEPUTY_S = 3.0
"""Between two agents that look after a job whose head is gone."""
LOOK_S = 1.0
"""Between two looks whether an agent before this one has done so. Slurm starts a component of the job again only when
all of its agents have ended, and kills them after its KillWait."""


class NextAttempt(DelayedSubmission):
    """What submitit saves before it requeues the job. On disk by then: else a power cut leaves no agent to start."""

    def dump(self, filepath: str | Path) -> None:
        """Write what submitit reads; it renames it afterwards."""
        plain = DelayedSubmission(self.function)
        plain.set_timeout(self._timeout_min, self._timeout_countdown)
        plain.dump(filepath)
        durable.sync(Path(filepath))
        durable.sync(Path(filepath).parent)


class AgentTask:
    """Callable with `checkpoint()`, as submitit wants it.

    Args:
        run_dir: the run's directory on the shared file system.
        first_attempt: number of the attempt that was submitted; every requeue gets a new one.
        submission: that the job is made for.
    """

    def __init__(self, run_dir: str, first_attempt: int, submission: str) -> None:
        self.run_dir = run_dir
        self.first_attempt = first_attempt
        self.submission = submission
        self._agent: NodeAgent | None = None
        self._head: Head | None = None
        self._threads: list[threading.Thread] = []
        self._terminated = False
        self._warned = False
        self._requeue: bool | None = None
        """Whether the run goes on, once that is on record."""

    def __call__(self) -> str:
        """Run this node's agent until the attempt ends; on the head, requeue the job if the run should go on."""
        os.umask(os.umask(0o022) | 0o022)  # whatever the site's: nobody else writes what a run has written
        # Signals may come before there is anybody to heed them: submitit would pass over SIGTERM for good, and end the
        # job for an USR2 without a checkpoint.
        signal.signal(signal.SIGTERM, self._on_term)
        of_submitit = signal.signal(signal.SIGUSR2, self._on_early_warning)
        rank = submitit.JobEnvironment().global_rank
        run = RunDirectory(Path(self.run_dir))
        attempt = self._attempt(run, rank)
        plan = attempt.plan()
        names = node_names(plan, os.environ)
        if (name := os.environ.get("SLURMD_NODENAME")) in names:  # a step may do without some nodes of the job
            rank = names.index(name)
        self._agent = NodeAgent(plan, rank, attempt, run.run_id, plan.python)
        self._threads = [threading.Thread(target=self._agent.run, name="agent", daemon=True)]
        if rank == 0:
            from primeslurm.node.head.head import Head  # which the other agents need not keep in memory

            self._head = Head(self._agent, run)
            self._threads.append(self._head)
        for thread in self._threads:
            thread.start()
        self._pass_on()
        signal.signal(signal.SIGUSR2, of_submitit)
        if self._warned:
            os.kill(os.getpid(), signal.SIGUSR2)
        self._join()
        if self._head is None and self._agent.head_lost:
            self._requeue_without_head(plan, run, attempt, rank)
        goes_on = self._head is not None and self._concluded(self._head)
        requeued_by_slurm = self._is_requeued_by_slurm(plan)
        if goes_on and not requeued_by_slurm:
            # submitit's own handler calls checkpoint(), saves this object for the next attempt and requeues the job.
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(600)
        if self._head is not None and self._terminated and plan.executor == "slurm":
            job_id = submitit.JobEnvironment().job_id
            if requeued_by_slurm and not goes_on:
                end_for_good(job_id)
            else:
                complete_requeue(plan, job_id, restarts(os.environ))
        return str(self._agent.ending.outcome) if self._agent.ending else ""

    def checkpoint(self) -> DelayedSubmission | None:
        """Called in the main thread on USR2: before the time limit, on preemption, or by ourselves after a failure."""
        if self._head is None:
            return None
        self._head.warn()
        self._join()
        if not self._concluded(self._head):
            return None
        if self._head.plan.executor == "slurm":  # submitit requeues after this; then it ends the process
            job_id = submitit.JobEnvironment().job_id
            atexit.register(see_requeued, self._head.plan, job_id, restarts(os.environ))
        # submitit saves beside it first, and stops where a power cut has left such a file.
        for left in files.listing(Path(self.run_dir, "submitit"), "*.save_tmp"):
            files.unlink(left)
        return NextAttempt(AgentTask(self.run_dir, self.first_attempt, self.submission))

    def _concluded(self, head: Head) -> bool:
        """Put the end on record, once: a warning of Slurm may come when the attempt has just ended by itself."""
        if self._requeue is None:
            self._requeue = head.conclude()
        return self._requeue

    def _is_requeued_by_slurm(self, plan: Plan) -> bool:
        """Whether Slurm starts the job again without being asked to. It may have said so only after a grace time."""
        if self._head is None or not self._terminated or plan.executor != "slurm":
            return False
        return self._head.requeued_by_slurm or is_requeued(submitit.JobEnvironment().job_id, restarts(os.environ))

    def _requeue_without_head(self, plan: Plan, run: RunDirectory, attempt: Attempt, rank: int) -> None:
        """The head's node is gone, and the batch script with it: nothing but another agent can end or requeue the job.

        One after the other looks whether an agent before it has done so.
        """
        if plan.executor != "slurm" or _is_seen_to(attempt, DEPUTY_S * (rank - 1)):
            return
        assert self._agent is not None
        ending = self._agent.ending
        assert ending is not None
        job_id, client = submitit.JobEnvironment().job_id, SlurmClient()
        if names := node_names(plan, os.environ):
            record_bad_node(plan, attempt, names[0], "it was the head, and fell silent", self._agent.journal)
        if conclude(plan, run, attempt, ending, self._agent.journal):
            requeue(client, job_id, restarts(os.environ))
            exclude_bad_nodes(plan, job_id)
        else:
            insist(client, partial(client.cancel, job_id))

    def _attempt(self, run: RunDirectory, rank: int) -> Attempt:
        """This start's attempt. A job that does not own the run ends here, before it has written anything."""
        start = this_start(os.environ, submitit.JobEnvironment().job_id)
        wait_s = PLAN_WAIT_S if rank else 0.0
        try:
            return enter(run, self.submission, start, first=self.first_attempt, wait_s=wait_s, visible_s=PLAN_WAIT_S)
        except NotOwnerError as error:
            print(f"primeslurm: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)

    def _join(self) -> None:
        # Short waits: a signal handler only runs between them.
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        print("SIGTERM: this job ends", file=sys.stderr, flush=True)
        self._terminated = True
        self._pass_on()

    def _on_early_warning(self, signum: int, frame: FrameType | None) -> None:
        self._warned = True

    def _pass_on(self) -> None:
        if self._terminated and self._head is not None:
            self._head.terminate()
        if self._terminated and self._agent is not None:
            self._agent.terminate()

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "first_attempt": self.first_attempt, "submission": self.submission}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _is_seen_to(attempt: Attempt, wait_s: float) -> bool:
    """Whether an agent that comes before this one puts the end on record; each has its time."""
    until = time.monotonic() + wait_s
    while attempt.end() is None:
        if (left := until - time.monotonic()) <= 0:
            return False
        time.sleep(min(left, LOOK_S))
        files.revalidate(attempt.path)  # the others are on other nodes: ask the server for new names
    return True
