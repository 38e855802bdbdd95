"""Runs code as another Unix user of the node, who owns nothing here.

    with stranger(lambda: os.mkdir("/tmp/theirs")) as attack: ...  # keeps its resources until the block ends
    attack = attempted(lambda: Path("/run/dir/secret").read_text())
    assert attack.error == "PermissionError"

An attack is any function. It runs in a forked process, so it may hold sockets, locks and files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STRANGER = 65534
"""The uid of `nobody`, who owns no file."""

needs_second_user = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another Unix user needs root")


@dataclass(frozen=True)
class Attack:
    """Result of an attack."""

    value: Any = None
    """Its return value, through JSON."""
    error: str = ""
    """Name of the exception that ended it."""
    trace: str = ""
    pid: int = 0

    @property
    def succeeded(self) -> bool:
        return not self.error


def _give_up_root() -> None:
    """Become the stranger permanently: no groups, no capabilities."""
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)


@contextlib.contextmanager
def stranger(attack: Callable[[], Any]) -> Iterator[Attack]:
    """Run an attack as another user. Its process, with its resources, lives until the block ends."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _attack(attack, theirs)
    theirs.close()
    try:
        with ours, ours.makefile("r") as answers:
            yield Attack(**json.loads(answers.readline()), pid=pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def attempted(attack: Callable[[], Any]) -> Attack:
    """Run an attack as another user, and wait for its end."""
    with stranger(attack) as done:
        return done


def _attack(attack: Callable[[], Any], connection: socket.socket) -> None:
    """Run in the forked process, send the result, and never return into the tests."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _give_up_root()
        try:
            answer = {"value": attack()}
        except BaseException as error:
            answer = {"error": type(error).__name__, "trace": traceback.format_exc()}
        connection.sendall(json.dumps(answer).encode() + b"\n")
        connection.recv(1)  # wait until the other end is closed
    finally:
        os._exit(0)


@contextlib.contextmanager
def public_directory(mode: int = 0o1777) -> Iterator[Path]:
    """Yield a directory that everybody can enter, with /tmp's mode by default. pytest's own directories are private."""
    path = Path(tempfile.mkdtemp(prefix="primeslurm-test-"))
    try:
        path.chmod(mode)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class ProcWatch(threading.Thread):
    """Searches the `/proc` entries of all processes for a word, until it is stopped.

    `word` returns the word, or an empty string as long as it is not known.
    """

    def __init__(self, word: Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self._word, self._over = word, threading.Event()
        self.found: set[str] = set()
        """Command lines of processes that show the word, and the entry."""
        self.rounds = 0

    def run(self) -> None:
        """Search about twenty times a second."""
        while not self._over.wait(0.05):
            if word := self._word().encode():
                self._look(word)
                self.rounds += 1

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _look(self, word: bytes) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("environ", "cmdline"):
                with contextlib.suppress(OSError):
                    if word in (process / name).read_bytes():
                        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        self.found.add(f"{name} of {command}")


@contextlib.contextmanager
def watching_for(secret_file: Path) -> Iterator[ProcWatch]:
    """Fail if a process shows the content of this file within the block."""

    def word() -> str:
        with contextlib.suppress(OSError):
            return secret_file.read_text().strip()
        return ""

    watch = ProcWatch(word)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
    assert not watch.found
    assert watch.rounds, "nothing was looked for"
