"""Runs a command as if a process of this node had started it.

    python -m primeslurm.node.host.exec_in_process PID AGENT_PID CMD...

Environment and working directory are taken from the running process itself, so that they are the real ones: GPUs,
library path, addresses and ports included. If it has ended, those of the node's agent are as near as it gets.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from primeslurm.wire import exit_codes

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES")
"""What describes the caller's terminal and not the process."""


def environment_of(pid: int) -> dict[str, str] | None:
    """Find the environment that a process was started with; None if it has ended or is another user's.

    Not psutil's, which ends at the first gap: a process that writes its title over its environment makes one.
    """
    try:
        entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if _NAME.match(name)}


def main(argv: Sequence[str]) -> int:
    """Becomes the command. Returns only if that is impossible: 127 if it is not there, 126 if nothing runs here."""
    pid, agent = (int(word) for word in argv[:2])
    command = list(argv[2:])
    base, own = environment_of(agent), environment_of(pid)
    if base is None:
        print(f"the agent {agent} does not run on this node any more", file=sys.stderr)
        return exit_codes.NOT_ON_THIS_NODE
    if own is None:
        print("the process does not run: this is its agent's environment", file=sys.stderr)
    os.chdir(Path("/proc") / str(agent if own is None else pid) / "cwd")
    terminal = {name: os.environ[name] for name in _TERMINAL if name in os.environ}
    try:
        # The agent's first: a process that changed its title has overwritten part of what it was started with.
        os.execvpe(command[0], command, base | (own or {}) | terminal)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return exit_codes.COMMAND_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
