"""The first program of a sandbox. It starts programs as the worker requests over a socket.

A bare Python (`python -I -S -c`) runs this file in each sandbox, so it imports little, and only the standard library.
Programs in the sandbox run as the same user: they can kill it, stop it, or forge its answers. Each message is one
packet of JSON, and an answer repeats the `id` of its request. `bwrap_sandbox` declares the answers. Requests:

    spawn    start a program. Four file descriptors follow: a file with argv, env and cwd, then stdin, stdout and
             stderr. The answer has a pid or an error; `exited` follows when the program ends.
    signal   send a signal to the process group of a pid.
    listen   open a port. The answer carries the listening socket.
    socket   the answer carries an unconnected socket.
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

MAX_MESSAGE = 4096


def send(control: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], fds)


def spawn(fds: list[int]) -> dict[str, object]:
    """Start a program in its own session and process group."""
    with os.fdopen(os.dup(fds[0]), "rb") as file:
        file.seek(0)
        message = json.load(file)
    os.makedirs(message["cwd"], exist_ok=True)  # noqa: PTH103 - pathlib would cost an import in every sandbox
    # The child reports an error through this pipe. A successful exec closes its end, and the parent reads nothing.
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            # JSON may escape each character to six. The answer must still fit into one packet.
            error = pipe.read(MAX_MESSAGE // 8).decode(errors="replace")
        return {"pid": pid, "error": error}
    try:
        os.setsid()  # so that a signal reaches the program with its children
        os.chdir(message["cwd"])
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except BaseException as error:
        os.write(write, str(error).encode(errors="replace")[:MAX_MESSAGE])
    os._exit(127)


def listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def answer(control: socket.socket, message: dict[str, int | str], fds: list[int]) -> None:
    """Carry out one request and send the answer."""
    result: dict[str, object] = {}
    sockets: list[socket.socket] = []
    try:
        if message["do"] == "spawn":
            result = spawn(fds)
        elif message["do"] == "signal":
            os.killpg(int(message["pid"]), int(message["signal"]))
        elif message["do"] == "listen":
            sockets = [listen(int(message["port"]))]
        elif message["do"] == "socket":
            sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM)]
    except ProcessLookupError:
        pass
    except OSError as error:
        result = {"error": str(error)[:500]}
    send(control, {"type": "answered", "id": message["id"], **result}, [each.fileno() for each in sockets])
    for each in sockets:
        each.close()


def reap(control: socket.socket) -> None:
    """Report programs that have ended. Orphans count too, because this process is their parent."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        send(control, {"type": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def main(control_fd: int, limits: dict[str, int]) -> None:
    """Serve requests until the worker closes the socket."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    # If the node runs out of memory, the kernel should kill sandboxes before it kills the worker.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    # SIGCHLD writes to a pipe, so that one select waits for requests and for ended programs.
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    send(control, {"type": "ready"})
    while True:
        ready, _, _ = select.select([control_fd, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 16)
            reap(control)
        if control_fd in ready:
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 8)
            if not data:
                return
            answer(control, json.loads(data), fds)
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
