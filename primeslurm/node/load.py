"""What a batch script starts on every node: submitit's own start, once it is known whose pickle it is to load.

    python -m primeslurm.node.load FOLDER

A pickle is code. Whoever could write to the folder, or put another run directory in the place of this one, would run
theirs as the user of the job.
"""

from __future__ import annotations

import sys
from pathlib import Path

from submitit.core.submission import process_job

from primeslurm.run.ownership import why_not_to_load
from primeslurm.wire import exits


def main(folder: str) -> int:
    """Run the job of this folder. Returns the exit code."""
    if why := why_not_to_load(Path(folder)):
        print(f"primeslurm: nothing of {folder} is loaded: {why}", file=sys.stderr, flush=True)
        return exits.FAILED
    process_job(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
