"""Run by the batch script after a job step that failed.

    python -m primeslurm.node.attempt.batch_epilogue RUN_DIR SUBMISSION CODE SRUN ...

Usually the head has recorded how the attempt ended, and has requeued the job. There may have been no head: srun ends
all tasks if it cannot reach one of the nodes. Or Slurm's controller did not answer the head.
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
from primeslurm.records.job_output import informative_lines, srun_error
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

# Number of the task that has written a line of the output (`srun --label`).
_LABEL = re.compile(r"^\d+: ")


def ending_of_step(
    end: EndRecord | None, job_state: str, code: int, unreached: dict[str, str], output: str
) -> Ending | None:
    """Return how the attempt has ended; None if the head has recorded it, or Slurm is ending or requeueing the job.

    `unreached` has the nodes on which srun could not start a task, and why. `output` is that of this start of the job.
    """
    if end is not None or job_state != "RUNNING":
        return None
    if unreached:
        name, why = next(iter(unreached.items()))
        more = f", nor on {len(unreached) - 1} more" if len(unreached) > 1 else ""
        return Ending(Outcome.FAILED, f"node {name}: no agent could be started ({why}){more}", name)
    lines = output.splitlines()
    if text := srun_error(lines):
        return Ending(Outcome.FAILED, f"no agent could be started: {text}", "job", error=text)
    error = error_line([_LABEL.sub("", line) for line in informative_lines(lines)]) or ""
    reason = f"srun ended with exit code {code}, and no agent has said why"
    return Ending(Outcome.FAILED, f"{reason}: {error}" if error else reason, "job", error=error)


class BatchEpilogue:
    """The remaining work of a job after its step, srun's command line, has failed.

    Raises:
        ClusterError: Slurm refused or did not answer. Also raised by the methods.
        RunError: the run belongs to another job, has no attempt, or none with a readable Plan.
        OSError: the run directory cannot be read or written. Also raised by the methods.
    """

    def __init__(self, run: RunDirectory, submission: str, step: list[str]) -> None:
        self._job_id, self._restarts = os.environ["SLURM_JOB_ID"], restarts(os.environ)
        self._run, self._step, self._client = run, step, SlurmClient()
        start = this_start(os.environ, self._job_id)
        self._attempt = enter(run, submission, start, wait_s=0.0)
        self._plan = self._attempt.plan()
        self._names = node_names(self._plan, os.environ)
        self._job_output = JobOutput(run.job_output(self._job_id), start.word)
        self._output = ""  # output of this start so far
        self._unreached: dict[str, str] = {}  # nodes on which no task could be started, and why
        self._journal = Journal(self._attempt.path, "batch")
        self._journal.note_storage_faults()

    def complete(self, code: int) -> int:
        """Start the step again on the remaining nodes, or requeue the job. Return the last step's exit code."""
        while code:
            end = self._attempt.end()
            if end is not None and end.requeued:  # the head may not have reached the controller
                self._requeue()
                break
            new_output = self._job_output.news()
            self._output += new_output
            failures = launch_failures(new_output)
            failures = {name: why for name, why in failures.items() if name not in self._unreached}
            self._unreached |= failures
            job = insist(self._client, partial(self._client.job, self._job_id))
            ending = ending_of_step(self._attempt.end(), job.state if job else "", code, self._unreached, self._output)
            if ending is None:
                break
            if len(self._unreached) < len(self._names):  # if srun reaches no node at all, no node is to blame
                self._blame(failures)
            if not failures or not spares_suffice(self._plan, self._names, self._unreached):
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
        self._journal.write(LaunchedAgain(sorted(self._unreached)))
        # srun ends all tasks some seconds after a failure. Until then a head may have assigned the remaining nodes.
        self._attempt.forget_agents()
        print(AGAIN, flush=True)
        argv = step_without(self._plan, self._names, self._unreached, self._step)
        return subprocess.run(argv, env={**os.environ, NODES: ",".join(self._names)}, check=False).returncode

    def _end(self, ending: Ending) -> None:
        self._journal.write(AttemptEnds(ending.outcome, ending.reason, ending.suspect))
        if conclude(self._plan, self._run, self._attempt, ending, self._journal):
            self._requeue()

    def _requeue(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue also ends this script, but there is work left
        requeue(self._client, self._job_id, self._restarts)
        exclude_bad_nodes(self._plan, self._job_id)


def main(run_dir: str, submission: str, code: str, *step: str) -> int:
    try:
        return BatchEpilogue(RunDirectory(Path(run_dir)), submission, list(step)).complete(int(code))
    except (ClusterError, RunError, OSError) as error:
        print(f"primeslurm: {error}", file=sys.stderr)
        return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
