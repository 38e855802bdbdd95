"""Imports modules once, and forks a process for every request: `python -m MODULE ARGS`, without the imports.

A node's workers import the same thousands of files, which takes each several seconds and hundreds of MB; forked ones
share both. Requests come through the socket that is file descriptor `argv[1]`: a byte with open files. The first holds
the request as JSON (`forks.ForkRequest`). The process gets the others: what it prints to, a pipe that gets its wait
status, and those that variables of its environment name. The answer is its process id. `ready`, before, says that all
is imported.
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
from primeslurm.node.agent.child_process import settle

MOST_FILES = 9


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Returns the request in the child, and None in the server when the socket is closed."""
    statuses: dict[int, int] = {}
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Slurm ends all processes of a job with the same signal, and what is forked has things to do then.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        connection.send(b"ready")
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if awake in ready:
                os.read(awake, 4096)
                reap(statuses)
            if connection.fileno() not in ready:
                continue
            message, files, _, _ = socket.recv_fds(connection, 1, MOST_FILES)
            if not message:
                return None
            asked, printed, status, *handed = files
            settled, settles = os.pipe()
            if pid := os.fork():
                statuses[pid] = status
                for each in (asked, printed, settles, *handed):
                    os.close(each)
                os.read(settled, 1)  # until it is closed: whoever is told of the process can send signals to its group
                os.close(settled)
                connection.send(str(pid).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.setsid()
            settle()
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            for each in (printed, status, settled, settles, *statuses.values(), awake, wakes):
                os.close(each)
            connection.close()
            with os.fdopen(asked, "rb") as file:
                file.seek(0)
                request: dict[str, Any] = json.load(file)
            _name(request["env"], request["handed"], handed)
            return request


def reap(statuses: dict[int, int]) -> None:
    """Write how children ended into their pipes."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = statuses.pop(pid)
        os.write(pipe, status.to_bytes(4, "little"))
        os.close(pipe)


def _name(env: dict[str, str], variables: list[str], files: list[int]) -> None:
    """Have variables, whose values begin with a descriptor, name it as it is here."""
    for variable, file in zip(variables, files, strict=True):
        os.set_inheritable(file, True)
        _, colon, rest = env[variable].partition(":")
        env[variable] = f"{file}{colon}{rest}"


def become(request: dict[str, Any]) -> None:
    """Run a module as the program of this process, under its own name."""
    setproctitle(" ".join([sys.executable, "-m", request["module"], *request["args"]]))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    tempfile.tempdir = None  # it was another one's
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator does so by itself
    sys.argv = [request["module"], *request["args"]]
    if not hasattr(sys.modules.get(request["module"]), "__path__"):  # of a package, its __main__ runs
        sys.modules.pop(request["module"], None)  # imported for what it imports; it runs as __main__
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def imported() -> socket.socket:
    """Import the modules of the command line. Returns the connection on which to serve."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    with uncollected():  # or a child's garbage collector would write to, and so copy, every page of them
        for module in sys.argv[2:]:
            importlib.import_module(module)
    return connection


if __name__ == "__main__" and (asked := serve(imported())) is not None:
    become(asked)
