"""A temporary directory of the tests, which also removes what killed processes leave."""

from __future__ import annotations

import os
import tempfile

from benchmarks.support import temporary
from primeslurm.node.host.exit_cleanup import ExitCleanup


def use_own() -> ExitCleanup:
    """Make this process and its children keep temporary files in a directory that is removed after they have ended.

    pytest keeps the directories of the last tests where they were. The directory is removed when the returned object
    is.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    return temporary.use_own()
