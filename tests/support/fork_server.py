"""The agents' fork server, extended so that a forked process has its own stdin, stdout and stderr.

A request is a JSON message {"module", "args", "env", "directory"} on the socket of file descriptor `argv[1]`, with
descriptors of stdin, stdout, stderr and a pipe for the wait status. The response is the process id. Forked processes
stay in the server's session, and outlive it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from primeslurm.node.agent.fork_server import become, import_modules, reap
from primeslurm.trainer.__main__ import leave

LONGEST = 1 << 20
"""Longest request [bytes]."""


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Return the request in the child; return None in the server when the socket is closed."""
    statuses: dict[int, int] = {}
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if awake in ready:
                os.read(awake, 4096)
                reap(statuses)
            if connection.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 4)
            if not message:
                return None
            *streams, status = descriptors
            if pid := os.fork():
                statuses[pid] = status
                for stream in streams:
                    os.close(stream)
                connection.send(str(pid).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
            for descriptor in (*descriptors, *statuses.values(), awake, wakes):
                os.close(descriptor)
            connection.close()
            request: dict[str, Any] = json.loads(message)
            return request


def run(request: dict[str, Any]) -> int:
    """Run the requested module as the program of this process, and return its exit code."""
    try:
        become(request)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__" and (request := serve(import_modules())) is not None:
    # Ranks that do not destroy their process groups were aborted by native destructors now and then.
    leave(run(request))
