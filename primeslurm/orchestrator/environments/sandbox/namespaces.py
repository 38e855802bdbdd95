"""Sockets of a container's network, made by a process that enters it for that alone and hands them over.

No privilege is needed where the container's user namespace is one of this user's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from primeslurm.orchestrator.environments.sandbox.port_forwarding import SandboxGoneError

ENTERING = "nsenter"
"""The command that enters namespaces, of util-linux."""
_LONGEST_S = 30
_MAKE = """
import socket, sys
found = socket.socket()
if port := int(sys.argv[2]):
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen(64)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"."], [found.fileno()])
"""


async def socket_within(pid: int, port: int | None) -> socket.socket:
    """Make a TCP socket in the network of a process.

    Args:
        pid: of the process.
        port: of its loopback, on which the socket listens; None: it is not connected yet.

    Raises:
        SandboxGoneError: its namespaces cannot be entered, or the port is taken.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            entering = [f"--user=/proc/{pid}/ns/user", f"--net=/proc/{pid}/ns/net", "--preserve-credentials"]
            making = [sys.executable, "-I", "-S", "-c", _MAKE, str(theirs.fileno()), str(port or 0)]
            process = await asyncio.create_subprocess_exec(
                *(ENTERING, *entering, "--", *making),
                env={"PATH": os.environ.get("PATH", os.defpath)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        try:
            async with asyncio.timeout(_LONGEST_S):
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            why = (said.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
            raise SandboxGoneError(f"the container's network cannot be entered: {why}")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    found = socket.socket(fileno=fds[0])
    found.setblocking(False)
    return found
