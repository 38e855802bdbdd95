"""The order of flushes, by system call. `tests/power` cuts the power of a virtual disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit.helpers import DelayedSubmission

from primeslurm.base import durable
from primeslurm.node.entry import AgentTask, NextAttempt
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret


class Calls:
    """Record flushes and renames below a directory, in order."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._root = root
        flush, replace = os.fsync, Path.replace

        def fsync(handle: int) -> None:
            self._note("flush", Path(f"/proc/self/fd/{handle}").readlink())
            flush(handle)

        def renamed(path: Path, target: Path) -> Path:
            self._note("name", target)
            return replace(path, target)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "replace", renamed)

    def _note(self, what: str, path: Path) -> None:
        name = str(path.relative_to(self._root))
        self.seen.append(f"{what} {'*' if name.endswith('.tmp') else name}")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    return Calls(tmp_path, monkeypatch)


def test_a_file_is_flushed_before_its_rename_and_the_directory_after(calls: Calls, tmp_path: Path) -> None:
    durable.write(tmp_path / "a", "text")
    assert calls.seen == ["flush *", "name a", "flush ."]


def test_a_new_directory_is_flushed_in_its_parent(calls: Calls, tmp_path: Path) -> None:
    durable.make_directory(tmp_path / "a" / "b", mode=0o700)
    durable.make_directory(tmp_path / "a" / "b")
    assert calls.seen == ["flush .", "flush a"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_the_secret_is_flushed_and_an_empty_one_replaced(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / secret.FILE).touch()
    secret.create(tmp_path)
    made = secret.read(tmp_path)
    secret.create(tmp_path)
    assert secret.read(tmp_path) == made and len(made) == 64
    assert calls.seen == ["flush secret", "flush ."]


def test_a_commit_follows_the_flush_of_its_files(calls: Calls, tmp_path: Path) -> None:
    directory = checkpoints.step_dir(tmp_path, 2)
    (directory / "trainer").mkdir(parents=True)
    (directory / "trainer" / "weights").write_bytes(b"1")
    (directory / "orchestrator.bin").write_bytes(b"2")
    checkpoints.commit(directory, 2, 1)
    step = "checkpoints/step_000002"
    named = calls.seen.index(f"name {step}/COMMITTED")
    parts = {f"{step}/trainer/weights", f"{step}/orchestrator.bin", f"{step}/trainer", step, "checkpoints"}
    assert {f"flush {part}" for part in parts} <= set(calls.seen[:named])
    assert calls.seen[named + 1 :] == [f"flush {step}", "flush *", "name checkpoints/NEWEST", "flush checkpoints"]


def test_the_pickle_of_a_requeue_is_flushed(calls: Calls, tmp_path: Path) -> None:
    saved = NextAttempt(AgentTask("/runs/a", 2, "w"))
    saved.set_timeout(7, 3)
    saved.dump(tmp_path / "agent.pkl")
    loaded = DelayedSubmission.load(tmp_path / "agent.pkl")
    assert (loaded.function.submission, loaded._timeout_min, loaded._timeout_countdown) == ("w", 7, 3)
    assert calls.seen == ["flush agent.pkl", "flush ."]


def test_a_file_system_may_refuse_to_flush_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    code = errno.EINVAL
    durable.sync(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        durable.sync(tmp_path)


def test_a_directory_without_read_permission_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", refuse)
    durable.sync(tmp_path)
    with pytest.raises(PermissionError):
        durable.sync(tmp_path / "file")
