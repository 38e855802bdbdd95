"""`python -m primeslurm.trainer`: one rank of the trainer.

Exit codes: 0 trained to the end; 75 interrupted and checkpointed; 1 failed, with the reason in the log.
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
from primeslurm.trainer.loops.interrupt import Interrupt
from primeslurm.wire.transport import secret


def main() -> int:
    """Parse the arguments, choose the device before torch is imported, and train."""
    parser = argparse.ArgumentParser(prog="python -m primeslurm.trainer", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe, JSON")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--orchestrator", help="tcp://host:port; needed for task rl")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    interrupt = Interrupt()  # before the imports below start threads
    secret.take()
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    with uncollected():
        from primeslurm.trainer.main import run

    return run(
        arguments.recipe, arguments.run_dir, arguments.attempt, arguments.orchestrator, arguments.device, interrupt
    )


def leave(code: int) -> NoReturn:
    """End this process after Python's threads and exit handlers, without the destructors of native libraries.

    One of those ended a rank by signal 6 ("terminate called without an active exception") after its last commit, and
    the completed attempt counted as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does before the handlers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
