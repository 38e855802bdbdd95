"""The secret of a run: what its own processes show one another, and nobody else can.

It is 32 random bytes in hex, in the file `secret` of the run directory (mode 0600). Each agent hands it to what it
starts, through a socket that a process inherits, reads empty and closes; what such a process spawns with
multiprocessing gets it from there. It is in no environment, command line, plan, script, log or status. HTTP servers ask
for it as a bearer token. ZMQ sockets ask for it as a password when a peer connects (PLAIN), one handshake a connection
and nothing on the messages. It keeps other users of the cluster out; it hides nothing from those who can read the
cluster's network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from primeslurm.base import files

if TYPE_CHECKING:  # what most processes of a run do without is imported where it is used: some are hundreds
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    import zmq
    import zmq.asyncio

VARIABLE = "PRIMESLURM_SECRET"
"""What a plan calls it. Agents set no such variable; who starts a process by hand may."""
HANDED_OVER = "PRIMESLURM_SECRET_FD"
"""Descriptor and inode of the socket from which a process reads it."""
FILE = "secret"
HANDSHAKE_S = 10.0
"""Who has connected and not shown the secret after so long is not listened to any more."""
_USER = b"primeslurm"
_INHERITED = b"primeslurm:"
"""Begins the authentication key of a process whose children are to get the secret: multiprocessing hands that on."""
_kept = ""
_authenticators: dict[int, Any] = {}
"""By context: ZMQ asks one for all sockets of a context."""


class SecretError(RuntimeError):
    """There is no secret where there must be one."""


def create(run_dir: Path) -> None:
    """Make the secret of a run, on disk when this returns; one that is there, and not empty, stays. Raises OSError."""
    from primeslurm.base import durable, files

    path = run_dir / FILE
    found = files.status(path)
    if found is not None and found.st_size:
        return

    def write() -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(os.urandom(32).hex())

    files.retrying(path, write)
    durable.sync(path)
    durable.sync(run_dir)


def read(run_dir: Path) -> str:
    """Read the secret of a run. Raises SecretError."""
    try:
        found = files.read_text(run_dir / FILE).strip()
    except OSError as error:
        raise SecretError(f"{run_dir / FILE}: {error.strerror}") from None
    if not found:
        raise SecretError(f"{run_dir / FILE} is empty")
    return found


def own() -> str:
    """Return the secret that this process was started with.

    Raises:
        SecretError: there is none; without one, nothing is served.
    """
    if not is_there():
        raise SecretError("no secret was handed over: processes of a run are started by its agents")
    return _kept or os.environ[VARIABLE]


def is_there() -> bool:
    """Tell whether this process was started with a secret."""
    take()
    return bool(_kept or os.environ.get(VARIABLE))


@contextmanager
def handing_over(value: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Make what a process that is started within reads the secret from.

    Yields:
        The descriptor that it must inherit, and the variables that tell it so.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(value.encode())
        yield theirs.fileno(), {HANDED_OVER: f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}"}


def take() -> None:
    """Read what was handed over to this process, if that is still to be done: early, before it starts others."""
    global _kept
    told = os.environ.pop(HANDED_OVER, "")
    if told:
        descriptor, inode = map(int, told.split(":"))
        if not _is_open(descriptor, inode):
            return  # a process of another kind handed its environment on
        with socket.socket(fileno=descriptor) as theirs, theirs.makefile() as text:
            _kept = text.read()
        _multiprocessing().authkey = _INHERITED + _kept.encode()
    elif not _kept and "multiprocessing" in sys.modules:
        key = bytes(_multiprocessing().authkey)
        _kept = key.removeprefix(_INHERITED).decode() if key.startswith(_INHERITED) else ""


def _multiprocessing() -> BaseProcess:
    from multiprocessing import current_process  # not above: many small processes need none of it

    return current_process()


def _is_open(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def keep() -> None:
    """Take the secret out of the environment: what this process starts (a model's tools, say) must not inherit it.

    Nor find it in `/proc/PID/environ`, which shows what a process was started with: it is overwritten there.
    """
    import ctypes

    global _kept
    _kept = own()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(VARIABLE.encode()):
        ctypes.memset(address, 0, len(_kept.encode()))
    os.environ.pop(VARIABLE, None)


def generate_token(secret: str) -> str:
    """Derive a token that only opens generation.

    For a router that adds its own token to whatever it relays, control routes included: it must not have the secret.
    """
    return hmac.new(secret.encode(), b"generate", hashlib.sha256).hexdigest()


def header() -> dict[str, str]:
    """Make the header that an HTTP client of the run sends."""
    return {"Authorization": f"Bearer {own()}"}


def present(socket: zmq.Socket[Any]) -> None:
    """Show the secret to those that the socket connects to. To be called before `connect`."""
    socket.plain_username = _USER
    socket.plain_password = own().encode()


def refusals(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """Return a socket by which `refused` hears of peers that refuse the secret.

    To be called before `connect`, or the first refusal may be missed.
    """
    import zmq

    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


async def refused(refusals: zmq.asyncio.Socket) -> str:
    """Wait until a peer refuses the secret, and say where it listens: another run does, and ZMQ does not try again."""
    from zmq.utils.monitor import recv_monitor_message

    return (await recv_monitor_message(refusals))["endpoint"].decode()


def demand(socket: zmq.Socket[Any]) -> None:
    """Let only peers in that show the secret, within HANDSHAKE_S. To be called before `bind`."""
    import zmq

    context = socket.context.underlying
    if context not in _authenticators:
        _authenticators[context] = _authenticator(context)
    socket.plain_server = True
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))


def _authenticator(context: int) -> Any:
    import logging

    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    log = logging.getLogger("primeslurm.zap")
    log.setLevel(logging.WARNING)  # below, it logs passwords
    found = ThreadAuthenticator(zmq.Context.shadow(context), log=log)
    found.start()
    found.configure_plain(domain="*", passwords={_USER.decode(): own()})
    return found
