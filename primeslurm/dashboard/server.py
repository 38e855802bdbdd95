"""The dashboard's HTTP server: its socket, its token, and the addresses to open."""

from __future__ import annotations

import contextlib
import getpass
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from primeslurm.base.errors import UsageError, Violation
from primeslurm.dashboard.access import TOKEN
from primeslurm.dashboard.job_states import JobStates
from primeslurm.dashboard.routes import application
from primeslurm.dashboard.run_data import RunIndex
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import JobQuery

# First port that is tried if the user names none.
PORT = 8420
TRIES = 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that is ready to serve."""

    runs: Path
    token: str
    host: str
    port: int
    listener: socket.socket
    query_of: Callable[[RunDirectory], JobQuery]

    @property
    def url(self) -> str:
        """Address with the token. The browser keeps the token as a cookie."""
        host = socket.getfqdn() if self.host in _EVERY_ADDRESS else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?{TOKEN}={self.token}"

    @property
    def tunnel(self) -> str:
        """Command for the user's own computer that makes the address work there; empty if none is needed."""
        if self.host not in LOOPBACK:
            return ""
        there = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh -N -L {self.port}:{there}:{self.port} {getpass.getuser()}@{socket.getfqdn()}"

    def serve(self) -> None:
        """Answer requests until SIGINT or SIGTERM."""
        states = JobStates(self.query_of)
        index = RunIndex(self.runs, states)
        # The list of hundreds of runs takes a second. It is ready when a browser asks for it.
        threading.Thread(target=_read_list, args=(index,), daemon=True).start()
        app = application(index, self.token, self._names(), f"primeslurm-{self.port}")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # addresses contain the token
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # event streams never end by themselves
        )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[self.listener])
        finally:
            states.close()

    def _names(self) -> set[str]:
        names = {"localhost"}
        if self.host not in LOOPBACK:
            names |= {self.host, socket.gethostname(), socket.getfqdn()}
        return names


def prepare(
    runs: Path, query_of: Callable[[RunDirectory], JobQuery], host: str = LOOPBACK[0], port: int | None = None
) -> Dashboard:
    """Open the dashboard's socket. Raises UsageError.

    `query_of` returns the function that asks Slurm about the jobs of a run. It must not write files.
    """
    listener = _listen(host, port)
    return Dashboard(runs, secrets.token_urlsafe(24), host, listener.getsockname()[1], listener, query_of)


def _read_list(index: RunIndex) -> None:
    with contextlib.suppress(OSError):  # a request for the list reports it
        index.overviews()


def _listen(host: str, port: int | None) -> socket.socket:
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        why = getattr(error, "strerror", None) or "it is no host name"
        raise UsageError([Violation("--host", host, f"has no address: {why}")]) from None
    problem: OSError | None = None
    for number in range(PORT, PORT + TRIES) if port is None else [port]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener
    assert problem is not None
    field, value = ("--port", str(port)) if port is not None else ("--host", host)
    ports = str(port) if port is not None else f"{PORT} to {PORT + TRIES - 1}"
    raise UsageError([Violation(field, value, f"cannot listen on {host}, port {ports}: {problem.strerror}")])
