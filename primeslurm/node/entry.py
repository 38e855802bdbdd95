"""The task that submitit runs on every node of the job: one pickled `AgentTask`, the same for all nodes."""

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
    cancel_requeued,
    complete_requeue,
    conclude,
    ensure_requeued,
    exclude_bad_nodes,
    is_requeued,
    record_bad_node,
)
from primeslurm.node.attempt.attempt_start import PLAN_WAIT_S, enter, this_start
from primeslurm.node.attempt.controller_commands import insist, requeue
from primeslurm.plan.model import Plan
from primeslurm.run.attempt_claims import NotOwnerError
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.launch_failures import node_names, restarts

if TYPE_CHECKING:
    from primeslurm.node.head.head import Head

# If the head is lost, an agent waits this long for each agent of lower rank before it ends or requeues the job.
DEPUTY_S = 3.0
# Period of looking for the record of another agent. It must be short: Slurm starts a component again only when all its
# agents have ended, and kills them after its KillWait.
POLL_S = 1.0


class NextAttempt(DelayedSubmission):
    """The state that submitit saves before it requeues the job, flushed to disk so that a power cut cannot lose it."""

    def dump(self, filepath: str | Path) -> None:
        plain = DelayedSubmission(self.function)
        plain.set_timeout(self._timeout_min, self._timeout_countdown)
        plain.dump(filepath)
        durable.sync(Path(filepath))
        durable.sync(Path(filepath).parent)


class AgentTask:
    """The agent of one node, callable and with `checkpoint()`, as submitit requires.

    `first_attempt` is the number of the submitted attempt; every requeue gets a new one. `submission` is the unique
    word that the job was submitted with.
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
        self._requeue: bool | None = None  # whether the job must be requeued, once the end is recorded

    def __call__(self) -> str:
        """Run this node's agent until the attempt ends. On the head, requeue the job if the run resumes."""
        os.umask(os.umask(0o022) | 0o022)  # nobody else may write files of the run, whatever the site's umask
        # Signals may arrive before the agent exists. submitit would ignore SIGTERM for good, and on USR2 end the job
        # without a checkpoint.
        signal.signal(signal.SIGTERM, self._on_term)
        submitit_handler = signal.signal(signal.SIGUSR2, self._on_early_warning)
        rank = submitit.JobEnvironment().global_rank
        run = RunDirectory(Path(self.run_dir))
        attempt = self._attempt(run, rank)
        plan = attempt.plan()
        names = node_names(plan, os.environ)
        if (name := os.environ.get("SLURMD_NODENAME")) in names:  # a step may run without some nodes of the job
            rank = names.index(name)
        self._agent = NodeAgent(plan, rank, attempt, run.run_id, plan.python)
        self._threads = [threading.Thread(target=self._agent.run, name="agent", daemon=True)]
        if rank == 0:
            from primeslurm.node.head.head import Head  # other agents need not keep it in memory

            self._head = Head(self._agent, run)
            self._threads.append(self._head)
        for thread in self._threads:
            thread.start()
        self._forward_term()
        signal.signal(signal.SIGUSR2, submitit_handler)
        if self._warned:
            os.kill(os.getpid(), signal.SIGUSR2)
        self._join()
        if self._head is None and self._agent.head_lost:
            self._end_without_head(plan, run, attempt, rank)
        resumes = self._head is not None and self._concluded(self._head)
        requeued_by_slurm = self._is_requeued_by_slurm(plan)
        if resumes and not requeued_by_slurm:
            # submitit's handler calls checkpoint(), saves its result for the next attempt, and requeues the job.
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(600)
        if self._head is not None and self._terminated and plan.executor == "slurm":
            job_id = submitit.JobEnvironment().job_id
            if requeued_by_slurm and not resumes:
                cancel_requeued(job_id)
            else:
                complete_requeue(plan, job_id, restarts(os.environ))
        return str(self._agent.ending.outcome) if self._agent.ending else ""

    def checkpoint(self) -> DelayedSubmission | None:
        """Called on USR2 in the main thread: before the time limit, on preemption, or sent by `__call__`."""
        if self._head is None:
            return None
        self._head.warn()
        self._join()
        if not self._concluded(self._head):
            return None
        if self._head.plan.executor == "slurm":  # submitit requeues the job after this call, and exits
            job_id = submitit.JobEnvironment().job_id
            atexit.register(ensure_requeued, self._head.plan, job_id, restarts(os.environ))
        # submitit writes a temporary file first, and fails if a power cut has left one.
        for left in files.listing(Path(self.run_dir, "submitit"), "*.save_tmp"):
            files.unlink(left)
        return NextAttempt(AgentTask(self.run_dir, self.first_attempt, self.submission))

    def _concluded(self, head: Head) -> bool:
        # Once only: a warning of Slurm may arrive when the attempt has just ended.
        if self._requeue is None:
            self._requeue = head.conclude()
        return self._requeue

    def _is_requeued_by_slurm(self, plan: Plan) -> bool:
        if self._head is None or not self._terminated or plan.executor != "slurm":
            return False
        # After a preemption Slurm may requeue the job only at the end of the grace time, so it is asked again.
        return self._head.requeued_by_slurm or is_requeued(submitit.JobEnvironment().job_id, restarts(os.environ))

    def _end_without_head(self, plan: Plan, run: RunDirectory, attempt: Attempt, rank: int) -> None:
        """End or requeue the job in place of the head, whose node is lost together with the batch script.

        Agents take turns by rank. Each one acts if those before it have not recorded the end.
        """
        if plan.executor != "slurm" or _ended_by_another(attempt, DEPUTY_S * (rank - 1)):
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
        """Return this start's attempt. A job that does not own the run exits here, before it has written anything."""
        start = this_start(os.environ, submitit.JobEnvironment().job_id)
        wait_s = PLAN_WAIT_S if rank else 0.0
        try:
            return enter(run, self.submission, start, first=self.first_attempt, wait_s=wait_s, visible_s=PLAN_WAIT_S)
        except NotOwnerError as error:
            print(f"primeslurm: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)

    def _join(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)  # signal handlers run only between two waits

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        print("SIGTERM: this job ends", file=sys.stderr, flush=True)
        self._terminated = True
        self._forward_term()

    def _on_early_warning(self, signum: int, frame: FrameType | None) -> None:
        self._warned = True

    def _forward_term(self) -> None:
        if self._terminated and self._head is not None:
            self._head.terminate()
        if self._terminated and self._agent is not None:
            self._agent.terminate()

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "first_attempt": self.first_attempt, "submission": self.submission}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _ended_by_another(attempt: Attempt, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while attempt.end() is None:
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(left, POLL_S))
        files.revalidate(attempt.path)  # another node writes the record, so this node's cache is out of date
    return True
