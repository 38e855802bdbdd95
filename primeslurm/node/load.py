"""What a batch script starts on every node: submitit's own start, once it is known whose pickle it is to load.

    python -m primeslurm.node.load FOLDER SUBMISSION

A pickle is code. Whoever could write to the folder, or put another run directory in the place of this one, would run
theirs as the user of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primeslurm.base import files
from primeslurm.records.attempt import pickled_agent
from primeslurm.run.ownership import why_not_to_load
from primeslurm.wire import exit_codes


def main(folder: str, submission: str) -> int:
    """Run the agent that was pickled in this folder for a submission. Returns the exit code."""
    if why := why_not_to_load(Path(folder)):
        print(f"primeslurm: nothing of {folder} is loaded: {why}", file=sys.stderr, flush=True)
        return exit_codes.FAILED
    with absent("numpy"):
        from submitit.core.submission import process_job
    _name_pickle(Path(folder), submission)
    process_job(folder)
    return 0


def _name_pickle(folder: Path, submission: str) -> None:
    """Give the pickle of the submission the name that submitit looks for, with the id of the job.

    Whoever submits the job could do so only after sbatch has answered, and may have been killed before that. A pickle
    that is there already was written by a requeue.
    """
    from submitit import JobEnvironment
    from submitit.core.utils import JobPaths

    pickle = JobPaths(folder, JobEnvironment().job_id).submitted_pickle
    if not files.exists(pickle):
        files.write_atomic(pickle, files.read_bytes(pickled_agent(folder, submission)))


@contextmanager
def absent(module: str) -> Iterator[None]:
    """Have imports within do without a module that they try first and need not have.

    submitit has numpy there for pickles with arrays. Ours have none, and an agent would keep its 6 MB, and the threads
    of its BLAS, for as long as it runs.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
