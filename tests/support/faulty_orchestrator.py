"""Runs `primeslurm.orchestrator` so that the first call of each kind on each file of its run directory fails."""

from __future__ import annotations

import errno
import sys
import zlib
from pathlib import Path

from primeslurm.orchestrator.__main__ import main
from tests.support.faulty_storage import FaultyStorage

NUMBERS = (errno.ESTALE, errno.EIO, errno.ESHUTDOWN)


def first_calls_fail() -> FaultyStorage:
    """Return the fault rule. The errno follows from the path. File flushes never fail."""
    seen: set[tuple[str, str]] = set()

    def fail(operation: str, path: str) -> int | None:
        if operation == "fsync" or path.endswith(".tmp") or (operation, path) in seen:
            return None
        seen.add((operation, path))
        return NUMBERS[zlib.crc32(path.encode()) % len(NUMBERS)]

    return FaultyStorage(Path(sys.argv[sys.argv.index("--run-dir") + 1]), fail)


if __name__ == "__main__":
    with first_calls_fail().installed():
        code = main(sys.argv[1:])
    sys.exit(code)
