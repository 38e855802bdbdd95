"""A faulty network file system: it returns errors, hides files of other nodes, and reports old sizes."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base import files

OPERATIONS = (
    "open",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "truncate",
)
"""Functions of `os` with a path as first argument. pathlib and shutil use them, too."""


@dataclass
class FakeTime:
    """A clock that only advances when somebody sleeps."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture(autouse=True)
def storage_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Make pauses between retries pass at once, and forget earlier faults."""
    time = FakeTime()
    monkeypatch.setattr(files, "clock", lambda: time.now)
    monkeypatch.setattr(files, "sleep", time.sleep)
    monkeypatch.setattr(files, "on_fault", None)
    monkeypatch.setattr(files, "on_pause", None)
    files._outages.clear()
    return time


@dataclass
class FaultyStorage:
    """Fault rules for calls of this process on paths below `root`.

    Attributes:
        root: directory in which the rules apply.
        fail: maps an operation and a path below root to an errno; None if the call succeeds.
        hidden: names of files and directories that this node does not see.
    """

    root: Path
    fail: Callable[[str, str], int | None] = lambda operation, path: None
    hidden: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def check(self, operation: str, path: Any) -> None:
        """Raise the error of the rules, if any."""
        if isinstance(path, int):
            with contextlib.suppress(OSError, ValueError):
                path = Path(f"/proc/self/fd/{path}").readlink()
        try:
            name = os.path.relpath(os.fspath(path), self.root)
        except (TypeError, ValueError):
            return
        if name.startswith(".."):
            return
        self.calls.append((operation, name))
        if any(part in self.hidden for part in Path(name).parts):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if (number := self.fail(operation, name)) is not None:
            raise OSError(number, os.strerror(number), os.fspath(path))

    @contextlib.contextmanager
    def installed(self) -> Iterator[FaultyStorage]:
        with pytest.MonkeyPatch.context() as patch:
            for operation in OPERATIONS:
                patch.setattr(os, operation, self._checked(operation, getattr(os, operation)))
            for operation in ("fsync", "ftruncate"):
                patch.setattr(os, operation, self._checked(operation, getattr(os, operation)))
            opened = self._checked("open", io.open)
            patch.setattr(io, "open", opened)
            patch.setattr(builtins, "open", opened)
            yield self

    def _checked(self, operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            self.check(operation, path)
            result = real(path, *args, **options)
            if operation == "listdir" and self.hidden:
                result = [name for name in result if name not in self.hidden]
            if operation == "open" and isinstance(result, io.IOBase):
                return _Faulty(result, self, path)
            return result

        return call


class _Faulty:
    """An open file whose reads and writes may fail."""

    def __init__(self, file: Any, storage: FaultyStorage, path: Any) -> None:
        self._file, self._storage, self._path = file, storage, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name in ("read", "readinto", "readline", "readlines", "write"):
            operation = "write" if name == "write" else "read"

            def call(*args: Any) -> Any:
                self._storage.check(operation, self._path)
                return value(*args)

            return call
        return value

    def __enter__(self) -> _Faulty:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


def once(*numbers: int, operations: tuple[str, ...] = (), names: str = "") -> Callable[[str, str], int | None]:
    """Return a rule: the first matching calls of each operation on each path fail with these errnos in turn."""
    left: dict[tuple[str, str], list[int]] = {}

    def fail(operation: str, path: str) -> int | None:
        if (operations and operation not in operations) or names not in path:
            return None
        lasting = re.sub(r"\.[0-9a-f]{12}\.tmp$", ".tmp", path)  # each try writes another temporary file
        queue = left.setdefault((operation, lasting), list(numbers))
        return queue.pop(0) if queue else None

    return fail
