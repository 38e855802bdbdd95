"""Outages of a network file system, by operation and errno."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.base import durable, files
from primeslurm.base.files import RETRY_S, Appender, Outage
from primeslurm.records import metrics
from primeslurm.records.events.nodes import AgentStarted
from primeslurm.records.events.processes import StorageFault
from primeslurm.records.journal import Journal
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import attempt_events
from tests.support.faulty_storage import FakeTime, FaultyStorage, once

NUMBERS = ("ESTALE", "EIO", "ESHUTDOWN", "ETIMEDOUT", "EAGAIN", "ENXIO", "EREMOTEIO", "ENOTCONN")


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    (tmp_path / "file").write_text("content")
    (tmp_path / "directory" / "below").mkdir(parents=True)
    return FaultyStorage(tmp_path)


Look = Callable[[Path], object]
READS: dict[str, tuple[Look, object]] = {
    "read": (lambda root: files.read_bytes(root / "file"), b"content"),
    "stream": (lambda root: files.reading(root / "file", lambda file: file.read(3)), b"con"),
    "digest": (lambda root: files.digest(root / "file"), hashlib.blake2b(b"content", digest_size=16).hexdigest()),
    "status": (lambda root: files.exists(root / "file"), True),
    "absent": (lambda root: files.exists(root / "nothing"), False),
    "list": (lambda root: [path.name for path in files.listing(root)], ["directory", "file"]),
    "below": (lambda root: [path.name for path in files.files_below(root)], ["file"]),
}
WRITES: dict[str, tuple[Look, Look, object]] = {
    "write": (lambda root: durable.write(root / "new", "text"), lambda root: (root / "new").read_text(), "text"),
    "json": (lambda root: files.write_json(root / "new", [1]), lambda root: files.read_json(root / "new"), [1]),
    "rename": (
        lambda root: durable.rename(root / "file", root / "other"),
        lambda root: (root / "other").read_text(),
        "content",
    ),
    "unlink": (lambda root: durable.remove(root / "file"), lambda root: (root / "file").exists(), False),
    "mkdir": (
        lambda root: durable.make_directory(root / "a" / "b"),
        lambda root: (root / "a" / "b").is_dir(),
        True,
    ),
    "rmtree": (lambda root: files.remove_tree(root / "directory"), lambda root: (root / "directory").exists(), False),
    "append": (lambda root: Appender(root / "log").append(b"1\n"), lambda root: (root / "log").read_bytes(), b"1\n"),
    "anew": (lambda root: durable.make_anew(root / "directory"), lambda root: list((root / "directory").iterdir()), []),
    "flush": (lambda root: durable.sync_tree(root), lambda root: (root / "file").read_text(), "content"),
}
FAIL = ("open", "read", "write", "stat", "lstat", "listdir", "rename", "replace", "unlink", "mkdir", "rmdir", "scandir")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", READS)
def test_a_read_survives_two_failures_of_each_call(name: str, number: str, storage: FaultyStorage) -> None:
    operation, expected = READS[name]
    storage.fail = once(*[getattr(errno, number)] * 2, operations=FAIL)
    with storage.installed():
        assert operation(storage.root) == expected


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_survives_two_failures_of_each_call(name: str, number: str, storage: FaultyStorage) -> None:
    operation, look, expected = WRITES[name]
    storage.fail = once(*[getattr(errno, number)] * 2, operations=FAIL)
    with storage.installed():
        operation(storage.root)
    assert look(storage.root) == expected
    assert list(storage.root.glob(".*")) == []


def test_an_operation_is_retried_for_a_minute(
    storage: FaultyStorage, storage_time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    storage.fail = lambda operation, path: errno.ESTALE
    began = storage_time.now
    with (
        storage.installed(),
        pytest.raises(OSError, match=r"Stale file handle \(\d+ failures in 5\d\.\d s\)") as raised,
    ):
        files.read_bytes(storage.root / "file")
    assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, str(storage.root / "file"))
    assert RETRY_S - files.LONGEST_PAUSE_S <= storage_time.now - began <= RETRY_S
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2, (
        "at the begin and at the end of the outage"
    )


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EISDIR])
def test_errors_of_a_file_are_not_retried(number: int, storage: FaultyStorage, storage_time: FakeTime) -> None:
    storage.fail = lambda operation, path: number
    with storage.installed(), pytest.raises(OSError, match=os.strerror(number)) as raised:
        files.read_bytes(storage.root / "file")
    assert raised.value.errno == number and storage_time.pauses == []


def test_a_directory_that_cannot_be_listed_is_an_error(storage: FaultyStorage) -> None:
    storage.fail = lambda operation, path: errno.EIO if operation == "listdir" else None
    with storage.installed():
        for look in (files.listing, files.files_below, files.settled_listing):
            with pytest.raises(OSError, match="Input/output"):
                look(storage.root)


def test_a_listing_that_misses_a_name_is_repeated(storage: FaultyStorage) -> None:
    listings = [{"file"}]

    def miss(operation: str, path: str) -> None:
        if operation == "listdir":
            storage.hidden = listings.pop() if listings else set()

    storage.fail = miss
    with storage.installed():
        assert [path.name for path in files.settled_listing(storage.root)] == ["directory", "file"]


def test_an_event_loop_is_blocked_for_half_a_second_at_most(storage: FaultyStorage, storage_time: FakeTime) -> None:
    storage.fail = lambda operation, path: errno.ESTALE

    async def read() -> None:
        files.read_bytes(storage.root / "file")

    for longest_s in (files.LOOP_RETRY_S, 0.0):
        began = storage_time.now
        with storage.installed(), pytest.raises(OSError, match="Stale"):
            asyncio.run(read())
        assert storage_time.now - began <= longest_s
    began = storage_time.now
    with storage.installed(), files.within(1.0), pytest.raises(OSError, match="Stale"):
        files.read_bytes(storage.root / "file")
    assert storage_time.now - began <= 1.0


def test_a_file_is_written_again_after_a_failed_flush(storage: FaultyStorage) -> None:
    flushed: list[bytes] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        place = Path(f"/proc/self/fd/{handle}")
        flushed.append(b"directory" if place.is_dir() else place.read_bytes())
        if len(flushed) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        durable.write(storage.root / "file", "newer")
        assert flushed == [b"newer", b"newer", b"directory"] and (storage.root / "file").read_text() == "newer"
        flushed.clear()
        with pytest.raises(OSError, match=r"Input/output error \(flush\)"):
            durable.sync(storage.root / "file")
        assert flushed == [b"newer"], "a second flush would succeed although the content is lost"
        flushed[:] = []
        durable.sync(storage.root)
        assert flushed == [b"directory"] * 2, "names are already at the server"
    assert [path.name for path in storage.root.glob(".*")] == []


def test_a_journal_is_rewritten_after_a_failed_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(RunDirectory(tmp_path / "run").attempt(1).path, "head")
    journal.write(AgentStarted("first", ""))
    path = tmp_path / "run" / "attempts" / "1" / "events" / "head.jsonl"
    content, inode, flushed, real = path.read_bytes(), path.stat().st_ino, list[str](), os.fsync

    def fsync(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        if len(flushed) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    journal.sync()
    assert path.read_bytes() == content and path.stat().st_ino != inode
    assert flushed[0] == "head.jsonl" and flushed[1].endswith(".tmp") and flushed[2:] == ["events", "events"]
    journal.write(AgentStarted("second", ""))
    assert path.read_bytes().startswith(content) and path.read_bytes().count(b"\n") == 2


def test_chunks_are_made_again_for_each_try(storage: FaultyStorage) -> None:
    storage.fail = once(errno.EIO, operations=("replace",))
    with storage.installed():
        files.write_atomic(storage.root / "file", lambda: iter([b"a", b"b"]))
    assert (storage.root / "file").read_bytes() == b"ab"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTEMPTY])
def test_a_directory_with_an_open_file_is_removed_once_it_is_closed(
    number: int, storage: FaultyStorage, storage_time: FakeTime
) -> None:
    """NFS keeps such a file as .nfs0000...; a rank of an earlier attempt may still be ending."""
    (storage.root / "directory" / "below" / "shard").write_text("x")
    storage.fail = once(number, operations=("rmdir",))
    with storage.installed():
        durable.make_anew(storage.root / "directory")
    assert list((storage.root / "directory").iterdir()) == []
    (storage.root / "directory" / "below").mkdir()
    (storage.root / "directory" / "below" / "shard").write_text("x")
    storage.fail = lambda operation, path: number if operation == "rmdir" else None
    with storage.installed(), pytest.raises(OSError, match=rf"failures in \d.*{storage.root}"):
        files.remove_tree(storage.root / "directory")


@pytest.mark.parametrize("lost", ["rename", "unlink", "mkdir"])
def test_an_operation_whose_answer_was_lost_counts_as_done(lost: str, storage: FaultyStorage) -> None:
    real, failures = getattr(os, lost), [1]

    def done_but_failed(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)
        if failures and failures.pop():
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, lost, done_but_failed)
        match lost:
            case "rename":
                files.rename(storage.root / "file", storage.root / "other")
                assert (storage.root / "other").read_text() == "content"
            case "unlink":
                files.unlink(storage.root / "file")
                assert not (storage.root / "file").exists()
            case _:
                files.make_directory(storage.root / "new")
                assert (storage.root / "new").is_dir()
    with pytest.raises(FileNotFoundError):
        files.rename(storage.root / "file" if lost == "rename" else storage.root / "none", storage.root / "other")


@pytest.mark.parametrize("failures", [1, 10**9])
def test_a_failed_append_leaves_no_half_line(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log = Appender(path)
    log.append(b"first\n")
    opened, left = Path.open, [failures]

    class Half:
        def __init__(self, file: object) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()  # type: ignore[attr-defined]

        def write(self, data: memoryview) -> int:
            if left[0] <= 0:
                return int(self._file.write(data))  # type: ignore[attr-defined]
            left[0] -= 1
            self._file.write(data[: len(data) // 2])  # type: ignore[attr-defined]
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", lambda self, *a, **o: Half(opened(self, *a, **o)))
    if failures == 1:
        log.append(b"second\n")
    else:
        monkeypatch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "again")))
        with pytest.raises(OSError, match="Input/output"):
            log.append(b"lost\n")
        monkeypatch.undo()
        log.append(b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_an_append_after_half_a_line_begins_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"whole": 1}\n{"ha')
    log = Appender(tmp_path / "log")
    log.append(b'{"next": 2}\n')
    log.append(b'{"last": 3}\n')
    assert (tmp_path / "log").read_bytes().split(b"\n") == [
        b'{"whole": 1}',
        b'{"ha',
        b'{"next": 2}',
        b'{"last": 3}',
        b"",
    ]


def test_an_outage_is_one_event_in_the_journal(tmp_path: Path, storage_time: FakeTime) -> None:
    run = RunDirectory(tmp_path / "run")
    attempt = run.attempt(1)
    journal = Journal(attempt.path, "head")
    journal.note_storage_faults()
    path = tmp_path / "run" / "state.json"
    path.write_text("1")
    storage = FaultyStorage(tmp_path, once(errno.ESTALE, errno.ESTALE, operations=("open",), names="state.json"))
    with storage.installed():
        assert files.read_json(path) == 1
        storage.fail = once(errno.EIO, operations=("open",), names="state.json")
        assert files.read_json(path) == 1, "within the same minute"
        storage_time.now += files.QUIET_S
        storage.fail = lambda operation, name: errno.EIO if name == "run/state.json" else None
        with pytest.raises(OSError, match="Input/output"):
            files.read_json(path)
    told = [event for event in attempt_events(attempt) if isinstance(event, StorageFault)]
    assert [(event.path, event.recovered) for event in told] == [(str(path), True), (str(path), False)]
    assert told[0].failures == 2 and "Stale file handle" in told[0].error


def test_events_during_an_outage_are_written_later_in_order(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    journal = Journal(attempt.path, "agent-1")
    storage = FaultyStorage(tmp_path, lambda operation, path: errno.EIO if operation == "open" else None)
    with storage.installed():
        journal.write(AgentStarted("first", ""))
    journal.write(AgentStarted("second", ""))
    assert [event.node for event in attempt_events(attempt) if isinstance(event, AgentStarted)] == ["first", "second"]


def test_a_row_that_could_not_be_written_comes_with_the_next(tmp_path: Path) -> None:
    log = metrics.MetricsLog(tmp_path, 0, tensorboard=False)
    with FaultyStorage(tmp_path, lambda operation, path: errno.EIO).installed(), pytest.raises(OSError, match="Input"):
        log.write(1, {"loss": 1.0})
    log.write(2, {"loss": 2.0})
    assert [json.loads(line)["step"] for line in (tmp_path / metrics.FILE).read_text().splitlines()] == [1, 2]


def test_outages_in_another_thread_are_reported(tmp_path: Path) -> None:
    told: list[Outage] = []
    files.on_fault = told.append
    (tmp_path / "a").write_text("x")
    with FaultyStorage(tmp_path, once(errno.ESTALE, operations=("open",))).installed():
        thread = threading.Thread(target=lambda: files.read_bytes(tmp_path / "a"))
        thread.start()
        thread.join()
    assert [(fault.path, fault.recovered) for fault in told] == [(tmp_path / "a", True)]
