"""The secret of a run, which its processes use to authenticate each other.

It is 32 random bytes in hex, in the file `secret` of the run directory (mode 0600). Agents hand it to their processes
through an inherited socket, which each process empties and closes; children by multiprocessing get it from their
parent. It is in no environment variable, command line, plan, script, log or status. HTTP servers ask for it as a bearer
token, ZMQ sockets use a key pair derived from it (`curve`), and torch's store is behind a handshake (`rendezvous`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from primeslurm.base import files

if TYPE_CHECKING:  # small processes, of which there may be hundreds, import none of these
    from multiprocessing.process import BaseProcess
    from pathlib import Path

# Placeholder in plans, and an environment variable for processes started by hand. Node agents do not set it.
VARIABLE = "PRIMESLURM_SECRET"
# Environment variable with descriptor and inode of the socket from which a process reads the secret
HANDED_OVER = "PRIMESLURM_SECRET_FD"
FILE = "secret"
HANDSHAKE_S = 10.0  # a peer that has not authenticated by then is disconnected
# Prefix of multiprocessing's authentication key, which children inherit, if it carries the secret.
_INHERITED = b"primeslurm:"
_secret = ""


class SecretError(RuntimeError):
    """There is no secret, or a server has another one."""


def create(run_dir: Path) -> None:
    """Create the secret of a run and flush it to disk. An existing secret stays. Raise OSError."""
    from primeslurm.base import durable

    path = run_dir / FILE
    status = files.status(path)
    if status is not None and status.st_size:
        return

    def write() -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(os.urandom(32).hex())

    files.retrying(path, write)
    durable.sync(path)
    durable.sync(run_dir)


def read(run_dir: Path) -> str:
    try:
        text = files.read_text(run_dir / FILE).strip()
    except OSError as error:
        raise SecretError(f"{run_dir / FILE}: {error.strerror}") from None
    if not text:
        raise SecretError(f"{run_dir / FILE} is empty")
    return text


def own_secret() -> str:
    if not is_there():
        raise SecretError("no secret was handed over: processes of a run are started by its agents")
    return _secret or os.environ[VARIABLE]


def is_there() -> bool:
    take()
    return bool(_secret or os.environ.get(VARIABLE))


@contextmanager
def handing_over(value: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Hand a secret to a process that is started in the body: yield the descriptor to inherit, and its variables."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(value.encode())
        yield theirs.fileno(), {HANDED_OVER: f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}"}


def take() -> None:
    """Read the secret that the parent handed to this process, once. Call it before starting other processes."""
    global _secret
    handed_over = os.environ.pop(HANDED_OVER, "")
    if handed_over:
        descriptor, inode = map(int, handed_over.split(":"))
        if not _is_open(descriptor, inode):
            return  # a parent of another kind passed its environment on, but not the socket
        with socket.socket(fileno=descriptor) as theirs, theirs.makefile() as text:
            _secret = text.read()
        _current_process().authkey = _INHERITED + _secret.encode()
    elif not _secret and "multiprocessing" in sys.modules:
        key = bytes(_current_process().authkey)
        _secret = key.removeprefix(_INHERITED).decode() if key.startswith(_INHERITED) else ""


def _current_process() -> BaseProcess:
    from multiprocessing import current_process

    return current_process()


def _is_open(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def keep() -> None:
    """Remember the secret and remove it from the environment, so that child programs do not inherit it."""
    import ctypes

    global _secret
    _secret = own_secret()
    # /proc/PID/environ shows the memory that the process was started with, so it is overwritten there, too.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(VARIABLE.encode()):
        ctypes.memset(address, 0, len(_secret.encode()))
    os.environ.pop(VARIABLE, None)


def key_for(use: bytes, run_secret: str = "") -> bytes:
    """Derive a 32-byte key for one use from a secret, by default this process's. Keys reveal nothing of each other."""
    return hmac.new((run_secret or own_secret()).encode(), use, hashlib.sha256).digest()


def generate_token(secret: str) -> str:
    """Derive a bearer token with which engines accept generation requests only.

    A router adds its own token to all requests that it relays, to control routes too, so it must not have the secret.
    """
    return hmac.new(secret.encode(), b"generate", hashlib.sha256).hexdigest()


def header() -> dict[str, str]:
    return {"Authorization": f"Bearer {own_secret()}"}
