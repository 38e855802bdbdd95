"""A full disk: records use the reserve, large files wait, and everything is written once there is space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.base import durable, files
from primeslurm.base.files import Appender
from tests.support.faulty_storage import FakeTime, FaultyStorage

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
AWAY = OSError(errno.EIO, os.strerror(errno.EIO))
SIZE = 2**16


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a reserve."""
    assert durable.fill_reserve(tmp_path, SIZE)
    return tmp_path


def disk(run: Path) -> FaultyStorage:
    """A disk that accepts writes only while the reserve is released."""

    def fail(operation: str, path: str) -> int | None:
        writes = operation in ("mkdir", "write", "replace", "rename", "fsync")
        return errno.ENOSPC if writes and (run / files.RESERVE).stat().st_size else None

    return FaultyStorage(run, fail)


def failing(times: int, error: Exception = FULL) -> Callable[[], str]:
    """Return a function that fails this many times, and then works."""
    failures = [error] * times

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    return write


@pytest.mark.parametrize(
    "write",
    [
        lambda run: files.write_json(run / "a.json", 1),
        lambda run: durable.write(run / "a.json", "1"),
        lambda run: durable.make_directory(run / "a" / "b"),
        lambda run: durable.rename(run / "file", run / "renamed"),
        lambda run: Appender(run / "log").append(b"line\n"),
    ],
)
def test_a_record_uses_the_reserve_on_a_full_disk(write: Callable[[Path], None], run: Path) -> None:
    (run / "file").touch()
    with disk(run).installed():
        write(run)
    assert durable.reserve_released(run / "attempts" / "1") and (run / files.RESERVE).stat().st_size == 0


def test_the_reserve_takes_space_and_is_filled_again_when_there_is_space_for_two(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (run / files.RESERVE).stat().st_blocks * 512 >= SIZE
    assert files.release_reserve(run / "attempts") and not files.release_reserve(run)
    monkeypatch.setattr(durable, "free_bytes", lambda _: 2 * SIZE - 1)
    assert not durable.fill_reserve(run, SIZE) and durable.reserve_released(run)
    monkeypatch.undo()
    assert durable.fill_reserve(run, SIZE) and not durable.reserve_released(run)


@pytest.mark.parametrize("error", [AWAY, READ_ONLY])
def test_the_reserve_is_for_a_full_disk_only(error: OSError, run: Path) -> None:
    with pytest.raises(OSError, match=error.strerror):
        files.writing(run / "a", failing(10**6, error))
    assert not durable.reserve_released(run)


def test_without_a_reserve_nothing_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        files.writing(tmp_path / "a", failing(1))
    assert not durable.reserve_released(tmp_path) and durable.write_bulk(tmp_path / "a", failing(0)) == ""


def test_a_large_file_does_not_use_the_reserve(run: Path) -> None:
    with disk(run).installed():
        why = durable.write_bulk(run / "a", lambda: durable.write(run / "a", "large"))
    assert why.startswith(str(FULL)) and not durable.reserve_released(run)
    files.release_reserve(run)
    assert durable.write_bulk(run / "a", lambda: durable.write(run / "a", "large")) == durable.RESERVE_RELEASED
    durable.fill_reserve(run)
    assert durable.write_bulk(run / "a", lambda: durable.write(run / "a", "large")) == ""
    assert (run / "a").read_text() == "large"


def test_a_large_file_waits_for_faults_that_may_pass_only(run: Path) -> None:
    assert durable.write_bulk(run / "a", failing(1, READ_ONLY)) == str(READ_ONLY)
    assert durable.write_bulk(run / "a", failing(1, AWAY)) == str(AWAY)
    with pytest.raises(PermissionError):
        durable.write_bulk(run / "a", failing(1, PermissionError(errno.EACCES, "Permission denied")))


@pytest.mark.parametrize(
    ("error", "unwritable"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (RuntimeError("rank 1: I/O error: No space left on device (os error 28)"), True),
        (READ_ONLY, True),
        (RuntimeError("rank 1: [Errno 30] Read-only file system: '/runs/x'"), True),
        (AWAY, False),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
)
def test_operations_are_repeated_while_the_disk_is_full_or_read_only(error: Exception, unwritable: bool) -> None:
    assert durable.is_unwritable(error) is unwritable
    if unwritable:
        assert durable.retry_until_written(failing(3, error)) == "written"
    else:
        with pytest.raises(type(error)):
            durable.retry_until_written(failing(3, error))


def test_a_wait_for_the_disk_sends_heartbeats_and_ends_in_time(
    storage_time: FakeTime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeats: list[float] = []
    monkeypatch.setattr(files, "on_pause", lambda: heartbeats.append(storage_time.now))
    refusals: list[Exception] = []
    began = storage_time.now
    with pytest.raises(OSError, match="No space"):
        durable.retry_until_written(failing(10**6), within_s=10.0, pause_s=2.0, refused=refusals.append)
    assert storage_time.now - began == 12.0 and len(heartbeats) == 6
    assert refusals == [FULL] * 6 and not caplog.records
    durable.retry_until_written(failing(1))
    assert [record.message for record in caplog.records] == [f"waiting for the file system: {FULL}"]


def test_a_shortage_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda _: 2**27)
    assert durable.describe_shortage(tmp_path) == f"0.12 GiB free in {tmp_path}, a run needs 0.25 GiB"
    assert durable.describe_shortage(tmp_path, 2**27) == ""
