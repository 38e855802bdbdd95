"""What the batch script runs after a step that failed.

    python -m primeslurm.node.attempt.batch_epilogue RUN_DIR SUBMISSION CODE SRUN ...

Usually the head has recorded how the attempt ended, and had the job requeued. It cannot where no head was there to do
so: srun ends all tasks when it cannot reach a single node to start one. And Slurm's controller may have been away.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from primeslurm.base.errors import ClusterError, RunError
from primeslurm.node.attempt.attempt_end import conclude, exclude_bad_nodes, record_bad_node
from primeslurm.node.attempt.attempt_start import enter, this_start
from primeslurm.node.attempt.controller_commands import insist, requeue
from primeslurm.records.attempt import EndRecord
from primeslurm.records.events.nodes import AttemptEnds, LaunchedAgain, NodeLost
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.job_output import srun_error, telling
from primeslurm.records.journal import Journal
from primeslurm.run.diagnosis.logs import error_line
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.launch_failures import (
    AGAIN,
    NODES,
    JobOutput,
    launch_failures,
    node_names,
    restarts,
    spares_suffice,
    step_without,
)

_LABEL = re.compile(r"^\d+: ")
"""Number of the task that has written a line of the output (`srun --label`)."""


def ending_of_step(
    end: EndRecord | None, job_state: str, code: int, unreached: dict[str, str], output: str
) -> Ending | None:
    """Tell how the attempt has ended, if nobody else says so and Slurm is not about to end or requeue the job. Pure.

    Args:
        end: what the head has recorded.
        job_state: Slurm's word for the job.
        code: srun's exit code.
        unreached: nodes on which it could not start a task, and why.
        output: of this start of the job.
    """
    if end is not None or job_state != "RUNNING":
        return None
    if unreached:
        name, why = next(iter(unreached.items()))
        more = f", nor on {len(unreached) - 1} more" if len(unreached) > 1 else ""
        return Ending(Outcome.FAILED, f"node {name}: no agent could be started ({why}){more}", name)
    lines = output.splitlines()
    if words := srun_error(lines):
        return Ending(Outcome.FAILED, f"no agent could be started: {words}", "job", error=words)
    error = error_line([_LABEL.sub("", line) for line in telling(lines)]) or ""
    reason = f"srun ended with exit code {code}, and no agent has said why"
    return Ending(Outcome.FAILED, f"{reason}: {error}" if error else reason, "job", error=error)


class BatchEpilogue:
    """What this job has left to do.

    Args:
        run: the run that the job belongs to.
        submission: that the job was made for.
        step: srun's command line.

    Raises:
        ClusterError: Slurm refused or did not answer; also in what follows.
        RunError: the run belongs to another job, has no attempt, or none with a readable plan.
        OSError: the run directory cannot be read or written; also in what follows.
    """

    def __init__(self, run: RunDirectory, submission: str, step: list[str]) -> None:
        self._job_id, self._restarts = os.environ["SLURM_JOB_ID"], restarts(os.environ)
        self._run, self._step, self._client = run, step, SlurmClient()
        start = this_start(os.environ, self._job_id)
        self._attempt = enter(run, submission, start, wait_s=0.0)
        self._plan = self._attempt.plan()
        self._names = node_names(self._plan, os.environ)
        self._output = JobOutput(run.job_output(self._job_id), start.word)
        self._said = ""
        """What was written into the job's output since this start."""
        self._unreached: dict[str, str] = {}
        """Nodes on which no task could be started, and why."""
        self._journal = Journal(self._attempt.path, "batch")
        self._journal.note_storage_faults()

    def see_to(self, code: int) -> int:
        """Start the attempt again on the nodes that are left, or requeue the job. Returns the last step's exit code."""
        while code:
            end = self._attempt.end()
            if end is not None and end.requeued:  # if the controller was away when the head asked for it: now
                self._requeue()
                break
            said = self._output.news()
            self._said += said
            told = launch_failures(said)
            news = {name: why for name, why in told.items() if name not in self._unreached}
            self._unreached |= news
            job = insist(self._client, partial(self._client.job, self._job_id))
            ending = ending_of_step(self._attempt.end(), job.state if job else "", code, self._unreached, self._said)
            if ending is None:
                break
            if len(self._unreached) < len(self._names):  # what befalls all of them is no node's fault
                self._blame(news)
            if not news or not spares_suffice(self._plan, self._names, self._unreached):
                self._end(ending)
                break
            code = self._launch_again()
        return code

    def _blame(self, nodes: dict[str, str]) -> None:
        for name, why in sorted(nodes.items()):
            reason = f"no agent could be started: {why}"
            self._journal.write(NodeLost(name, self._names.index(name), reason))
            record_bad_node(self._plan, self._attempt, name, reason, self._journal)

    def _launch_again(self) -> int:
        """A head may have assigned the nodes that are left already: srun gives it seconds before it ends all tasks."""
        self._journal.write(LaunchedAgain(sorted(self._unreached)))
        self._attempt.forget_agents()
        print(AGAIN, flush=True)
        argv = step_without(self._plan, self._names, self._unreached, self._step)
        return subprocess.run(argv, env={**os.environ, NODES: ",".join(self._names)}, check=False).returncode

    def _end(self, ending: Ending) -> None:
        self._journal.write(AttemptEnds(ending.outcome, ending.reason, ending.suspect))
        if conclude(self._plan, self._run, self._attempt, ending, self._journal):
            self._requeue()

    def _requeue(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this script as well, but not at once
        requeue(self._client, self._job_id, self._restarts)
        exclude_bad_nodes(self._plan, self._job_id)


def main(run_dir: str, submission: str, code: str, *step: str) -> int:
    """Returns the exit code of the last step."""
    try:
        return BatchEpilogue(RunDirectory(Path(run_dir)), submission, list(step)).see_to(int(code))
    except (ClusterError, RunError, OSError) as error:
        print(f"primeslurm: {error}", file=sys.stderr)
        return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
