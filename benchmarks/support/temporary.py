"""A temporary directory of a process's own: what others that it kills leave there goes with it, however it ends."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

from primeslurm.node.host.exit_cleanup import ExitCleanup


def use_own() -> ExitCleanup:
    """Have this process and all that it starts keep temporary files in a directory that goes when they have ended.

    torch keeps what it has compiled where it was.

    Returns:
        Who removes the directory: when nobody holds this any more.
    """
    shared = tempfile.gettempdir()
    own = Path(tempfile.mkdtemp(prefix="ps", dir=shared))  # a short name: paths of sockets are
    own.chmod(0o1777)  # as /tmp: tests act as other users, too
    sweeper = ExitCleanup()
    sweeper.add(own)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    return sweeper
