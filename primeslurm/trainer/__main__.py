"""Run one rank of the trainer: `python -m primeslurm.trainer`.

Exit codes: 0 = training finished, 75 = interrupted after a checkpoint, 1 = failed (the log has the reason).
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from primeslurm.base.imports import uncollected
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.wire.transport import secret


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.trainer", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe (JSON)")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--orchestrator", help="tcp://host:port; required for task rl")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    interrupt = Interrupt()  # blocks the signal before the imports below start threads
    secret.take()
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    with uncollected():
        from primeslurm.trainer.main import run

    return run(
        arguments.recipe, arguments.run_dir, arguments.attempt, arguments.orchestrator, arguments.device, interrupt
    )


def leave(code: int) -> NoReturn:
    """Exit after Python's threads and exit handlers, without running the destructors of native libraries."""
    # A native destructor once aborted a rank ("terminate called without an active exception") after the last commit,
    # and the completed attempt counted as failed.
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does before exit handlers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
