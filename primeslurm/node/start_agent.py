"""Start the node agent. The batch script runs this module on every node.

It checks who could write the pickled agent, loads it with submitit, and runs it:

    python -m primeslurm.node.start_agent FOLDER SUBMISSION

A pickle is code. Another user who could write to the folder, or replace the run directory, could run code as the user
of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primeslurm.base import files
from primeslurm.records.attempt import pickled_agent
from primeslurm.run.directory_security import pickle_problems
from primeslurm.wire import exit_codes


def main(folder: str, submission: str) -> int:
    if why := pickle_problems(Path(folder)):
        print(f"primeslurm: refuses to load {folder}: {why}", file=sys.stderr, flush=True)
        return exit_codes.FAILED
    # submitit imports NumPy to unpickle arrays. Ours have none, and the agent would keep 6 MB and the threads of a
    # BLAS.
    with hide_module("numpy"):
        from submitit.core.submission import process_job
    _copy_pickle(Path(folder), submission)
    process_job(folder)
    return 0


def _copy_pickle(folder: Path, submission: str) -> None:
    """Copy the submission's pickle to the name that submitit expects, which contains the job id.

    The submitting process knows the id only after sbatch has answered, and may be killed before. A requeue writes a
    newer pickle under that name, which stays.
    """
    from submitit import JobEnvironment
    from submitit.core.utils import JobPaths

    pickle = JobPaths(folder, JobEnvironment().job_id).submitted_pickle
    if not files.exists(pickle):
        files.write_atomic(pickle, files.read_bytes(pickled_agent(folder, submission)))


@contextmanager
def hide_module(module: str) -> Iterator[None]:
    """Make imports of an optional module fail within the block, unless it is already imported."""
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
