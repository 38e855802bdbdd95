"""What runs within a sandbox and starts its programs, as the worker outside asks over a socket.

It is given to a bare Python (`python -I -S -c`), so it imports nothing but the standard library, and little of that:
each rollout in flight has one. Programs beside it run as the same user and may kill or stop it; whoever reads its
answers must expect anything. A message is one packet, a JSON text. Requests carry `id`; the answer has it, too. What
it sends is declared in `answers`.

    spawn: four file descriptors: a file with argv, env and cwd, and what the program reads and writes. Answered by
        pid or error; `exited` follows.
    signal: to the process group of a pid.
    listen: on a port; the answer carries the listening socket.
    socket: the answer carries a socket that is not connected yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 4096


def send(control: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    """Send one message, and descriptors with it."""
    socket.send_fds(control, [json.dumps(message).encode()], fds)


def spawn(fds: list[int]) -> dict[str, object]:
    """Start a program in a process group of its own."""
    with os.fdopen(os.dup(fds[0]), "rb") as file:
        file.seek(0)
        message = json.load(file)
    os.makedirs(message["cwd"], exist_ok=True)  # noqa: PTH103 - one import less in each sandbox
    read, write = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            why = pipe.read(LONGEST // 8).decode(errors="replace")  # an answer is one message, JSON's escapes included
        return {"pid": pid, "error": why}
    try:
        os.setsid()
        os.chdir(message["cwd"])
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except BaseException as error:
        os.write(write, str(error).encode(errors="replace")[:LONGEST])
    os._exit(127)


def listening(port: int) -> socket.socket:
    """A socket that listens on a port of this network, or on a free one."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen(64)
    return found


def answer(control: socket.socket, message: dict[str, int | str], fds: list[int]) -> None:
    """Do what one request asks, and say how it went."""
    result: dict[str, object] = {}
    sockets: list[socket.socket] = []
    try:
        if message["do"] == "spawn":
            result = spawn(fds)
        elif message["do"] == "signal":
            os.killpg(int(message["pid"]), int(message["signal"]))
        elif message["do"] == "listen":
            sockets = [listening(int(message["port"]))]
        elif message["do"] == "socket":
            sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM)]
    except ProcessLookupError:
        pass
    except OSError as error:
        result = {"error": str(error)[:500]}
    send(control, {"type": "answered", "id": message["id"], **result}, [each.fileno() for each in sockets])
    for each in sockets:
        each.close()


def ended(control: socket.socket) -> None:
    """Tell of programs that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        send(control, {"type": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def main(control_fd: int, limits: dict[str, int]) -> None:
    """Serve until the socket is closed."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    # When memory runs out, the kernel ends sandboxes first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    send(control, {"type": "ready"})
    while True:
        ready, _, _ = select.select([control_fd, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 16)
            ended(control)
        if control_fd in ready:
            data, fds, _, _ = socket.recv_fds(control, LONGEST, 8)
            if not data:
                return
            answer(control, json.loads(data), fds)
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
