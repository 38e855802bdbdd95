"""A temporary directory of the tests' own: what processes that tests kill leave in it goes with it, however it ends."""

from __future__ import annotations

import os
import tempfile

from benchmarks.support import temporary
from primeslurm.node.host.exit_cleanup import ExitCleanup


def use_own() -> ExitCleanup:
    """Have this process and all that it starts keep temporary files in a directory that goes when they have ended.

    pytest keeps its directories of the last tests where they were.

    Returns:
        Who removes the directory: when nobody holds this any more.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    return temporary.use_own()
