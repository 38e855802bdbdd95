"""Runs a command with the environment and working directory of a process of this node.

    python -m primeslurm.node.host.attached_command PID AGENT_PID CMD...

They include the GPUs, library path, addresses and ports of the process. If the process has ended, those of its agent
are used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from primeslurm.wire import exit_codes

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# Variables about the caller's terminal.
_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES")


def environment_of(pid: int) -> dict[str, str] | None:
    """Return the environment of a process; None if it has ended or belongs to another user."""
    # psutil stops at the first gap. A process that writes its title over its environment makes one.
    try:
        entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if _NAME.match(name)}


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command. Return an exit code only if that is impossible."""
    pid, agent = (int(word) for word in argv[:2])
    command = list(argv[2:])
    agent_env, process_env = environment_of(agent), environment_of(pid)
    if agent_env is None:
        print(f"the agent {agent} does not run on this node any more", file=sys.stderr)
        return exit_codes.NOT_ON_THIS_NODE
    if process_env is None:
        print("the process does not run: using the environment of its agent", file=sys.stderr)
    os.chdir(Path("/proc") / str(agent if process_env is None else pid) / "cwd")
    terminal = {name: os.environ[name] for name in _TERMINAL if name in os.environ}
    try:
        # A process that has changed its title has overwritten a part of its environment: the agent's fills the gap.
        os.execvpe(command[0], command, agent_env | (process_env or {}) | terminal)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return exit_codes.COMMAND_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
