"""A temporary directory of a process, which also removes what killed child processes leave."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

from primeslurm.node.host.exit_cleanup import ExitCleanup


def use_own() -> ExitCleanup:
    """Make this process and its children keep temporary files in a directory that is removed after they have ended.

    torch's cache of compiled code stays where it was. The directory is removed when the returned object is.
    """
    shared = tempfile.gettempdir()
    own = Path(tempfile.mkdtemp(prefix="ps", dir=shared))  # a short name, because it is part of socket paths
    own.chmod(0o1777)  # as /tmp: tests also act as other users
    sweeper = ExitCleanup()
    sweeper.add(own)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    return sweeper
