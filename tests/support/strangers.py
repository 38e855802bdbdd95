"""Another Unix user of the node, who attacks: code that runs as an uid that owns nothing here.

    with stranger(lambda: os.mkdir("/tmp/theirs")) as attack: ...  # it holds what it has until the end
    attack = attempted(lambda: Path("/run/dir/secret").read_text())
    assert attack.error == "PermissionError"

An attack runs in a forked process, so it may be any function, and hold sockets, locks and files meanwhile.
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
"""The uid: `nobody`, who owns no file."""
OTHER_STRANGER = 65533

needs_second_user = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another Unix user needs root")


@dataclass(frozen=True)
class Attack:
    """What came of an attack."""

    value: Any = None
    """What it returned, through JSON."""
    error: str = ""
    """Name of the exception that it ended with."""
    trace: str = ""
    pid: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether nothing refused it."""
        return not self.error


def become(uid: int = STRANGER) -> None:
    """Give up root, for good: no groups, no capabilities. Nothing of this process is left to go back with."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@contextlib.contextmanager
def stranger(attack: Callable[[], Any], uid: int = STRANGER) -> Iterator[Attack]:
    """Run an attack as another user; its process, and what it holds, lives until the block ends."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _attack(attack, uid, theirs)
    theirs.close()
    try:
        with ours, ours.makefile("r") as told:
            yield Attack(**json.loads(told.readline()), pid=pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def attempted(attack: Callable[[], Any], uid: int = STRANGER) -> Attack:
    """Run an attack as another user, to its end."""
    with stranger(attack, uid) as done:
        return done


def _attack(attack: Callable[[], Any], uid: int, told: socket.socket) -> None:
    """What the forked process does; it never returns into the tests."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        become(uid)
        try:
            answer = {"value": attack()}
        except BaseException as error:
            answer = {"error": type(error).__name__, "trace": traceback.format_exc()}
        told.sendall(json.dumps(answer).encode() + b"\n")
        told.recv(1)  # until the other end is closed
    finally:
        os._exit(0)


@contextlib.contextmanager
def public_directory(mode: int = 0o1777) -> Iterator[Path]:
    """A directory that everybody can enter: pytest's own are closed to others. As /tmp is, unless told otherwise."""
    path = Path(tempfile.mkdtemp(prefix="primeslurm-test-"))
    try:
        path.chmod(mode)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class ProcWatch(threading.Thread):
    """Looks through what `/proc` shows of all processes, to whom it may, for a word; all the time until it is stopped.

    Args:
        word: returns it; empty as long as it is not known.
    """

    def __init__(self, word: Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self._word, self._over = word, threading.Event()
        self.found: set[str] = set()
        """Command lines of processes that showed it, and where."""
        self.rounds = 0

    def run(self) -> None:
        """Look, about twenty times a second."""
        while not self._over.wait(0.05):
            if word := self._word().encode():
                self._look(word)
                self.rounds += 1

    def stop(self) -> None:
        """Look no more."""
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
    """Fail if a process shows, within the block, what stands in this file, as soon as there is one."""

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
