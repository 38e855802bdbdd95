"""A program for tests of the fork server: reports its own properties, exits or waits."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from primeslurm.records.heartbeats import liveness
from primeslurm.wire.transport import secret


def say(path: Path) -> None:
    """Write properties of this process."""
    sys.stderr.write("an error\n")
    liveness().heartbeat()
    properties = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "directory": str(Path.cwd()),
        "words": sys.argv[1:],
        "variable": os.environ.get("A_VARIABLE"),
        "temporary": tempfile.gettempdir(),
        "secret": secret.own_secret() if secret.is_there() else None,
        "usr2": signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN,
        "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "random": random.random(),
    }
    path.write_text(json.dumps(properties))


if __name__ == "__main__":
    match sys.argv[1]:
        case "say":
            say(Path(sys.argv[2]))
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "wait":
            time.sleep(600)
        case "wait for the end":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            Path(sys.argv[2]).touch()
            time.sleep(600)
