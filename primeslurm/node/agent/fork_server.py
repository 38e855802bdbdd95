"""A server that imports modules once, and then forks a process per request in place of `python -m MODULE ARGS`.

It pays off for environment workers, which all import the same thousands of files. On two cores, 16 forked workers start
in 24 s and take 1.7 GB of memory. If each imports by itself, they take 137 s and 6.3 GB (`benchmarks/worker_start.py`).

The socket `argv[1]` carries the requests. A request is one byte with open files: a file that holds a `ForkRequest` as
JSON, the log, a pipe for the wait status, and the files that variables of its environment name. The answer is the
process id. Before the first request, the server sends `ready` once it has imported all modules.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from typing import Any

from setproctitle import setproctitle

from primeslurm.base.imports import uncollected
from primeslurm.node.agent.child_process import prepare_child

MAX_FILES = 9


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Return the request in the child, and None in the server once the socket is closed."""
    status_pipes: dict[int, int] = {}  # by process id
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Slurm sends the same signal to all processes of a job. The forked ones still have work to do then, and end with
    # this server.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        connection.send(b"ready")
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wakeup in ready:
                os.read(wakeup, 4096)
                reap(status_pipes)
            if connection.fileno() not in ready:
                continue
            message, files, _, _ = socket.recv_fds(connection, 1, MAX_FILES)
            if not message:
                return None
            request_file, log, status_pipe, *passed = files
            group_made, group_made_end = os.pipe()
            if pid := os.fork():
                status_pipes[pid] = status_pipe
                for each in (request_file, log, group_made_end, *passed):
                    os.close(each)
                # The child closes its end once it leads a process group. Only then may the agent learn its id, because
                # it sends signals to the group.
                os.read(group_made, 1)
                os.close(group_made)
                connection.send(str(pid).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.setsid()
            prepare_child()
            os.dup2(log, 1)
            os.dup2(log, 2)
            for each in (log, status_pipe, group_made, group_made_end, *status_pipes.values(), wakeup, wakeup_end):
                os.close(each)
            connection.close()
            with os.fdopen(request_file, "rb") as file:
                file.seek(0)
                request: dict[str, Any] = json.load(file)
            _renumber(request["env"], request["passed"], passed)
            return request


def reap(status_pipes: dict[int, int]) -> None:
    """Write the wait status of each child that has ended into its pipe."""
    while status_pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = status_pipes.pop(pid)
        os.write(pipe, status.to_bytes(4, "little"))
        os.close(pipe)


def _renumber(env: dict[str, str], variables: list[str], files: list[int]) -> None:
    for variable, file in zip(variables, files, strict=True):
        os.set_inheritable(file, True)
        _, colon, rest = env[variable].partition(":")
        env[variable] = f"{file}{colon}{rest}"


def become(request: dict[str, Any]) -> None:
    """Run the requested module as the program of this process."""
    setproctitle(" ".join([sys.executable, "-m", request["module"], *request["args"]]))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    # Reset what libraries have cached at import in the server: its temporary directory, and NumPy's random state.
    # Python's own random module reseeds itself after a fork.
    tempfile.tempdir = None
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.argv = [request["module"], *request["args"]]
    # The module was imported for its imports. It runs again as __main__; of a package, its __main__ module does.
    if not hasattr(sys.modules.get(request["module"]), "__path__"):
        sys.modules.pop(request["module"], None)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def import_modules() -> socket.socket:
    """Import the modules of the command line, and return the connection to serve on."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Otherwise the garbage collector of each child would write to all imported objects, and so copy their memory.
    with uncollected():
        for module in sys.argv[2:]:
            importlib.import_module(module)
    return connection


if __name__ == "__main__" and (request := serve(import_modules())) is not None:
    become(request)
