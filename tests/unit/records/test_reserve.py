"""Space that is kept for records: given up when there is none, filled again, and what waits meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primeslurm.records import reserve
from primeslurm.records.events.nodes import AgentStarted
from primeslurm.records.journal import Journal
from primeslurm.records.reading import whole_lines
from primeslurm.records.reserve import Reserve, is_full, may_pass, shortage, until_written

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
SIZE = 2**16


@pytest.mark.parametrize(
    ("error", "full", "passes"),
    [
        (FULL, True, True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True, True),
        (RuntimeError("rank 1: I/O error: No space left on device (os error 28)"), True, True),
        (READ_ONLY, False, True),
        (RuntimeError("rank 1: [Errno 30] Read-only file system: '/runs/x'"), False, True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False, False),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), False, False),
    ],
)
def test_which_errors_are_the_file_systems(error: Exception, full: bool, passes: bool) -> None:
    assert (is_full(error), may_pass(error)) == (full, passes)


def fails(times: int, error: OSError = FULL) -> Callable[[], str]:
    """Fails so often, and then works."""
    left = [times]

    def write() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "written"

    return write


def test_the_reserve_is_spent_on_records_and_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Reserve(tmp_path, SIZE)
    assert kept.fill() and not kept.given_up
    assert (tmp_path / ".reserve").stat().st_blocks * 512 >= SIZE, "it must take space"
    assert kept.spend_on(fails(1)) == "written"
    assert kept.given_up and Reserve(tmp_path, SIZE).given_up
    with pytest.raises(OSError, match="No space"):
        kept.spend_on(fails(1))  # nothing is left to give up
    monkeypatch.setattr(reserve, "free_bytes", lambda _: 2 * SIZE - 1)
    assert not kept.fill() and kept.given_up
    monkeypatch.undo()
    assert kept.fill() and not kept.given_up
    with pytest.raises(OSError, match="Input/output"):
        kept.spend_on(fails(1, OSError(errno.EIO, "Input/output error")))
    assert not kept.given_up, "it helps nothing but a want of space"


def test_where_nobody_keeps_a_reserve_nothing_waits_for_it(tmp_path: Path) -> None:
    kept = Reserve(tmp_path)
    assert not kept.given_up and not kept.give_up()
    with pytest.raises(OSError, match="No space"):
        kept.spend_on(fails(1))


@pytest.mark.parametrize("error", [FULL, READ_ONLY])
def test_waiting_for_the_file_system(error: OSError) -> None:
    assert until_written(fails(3, error), pause_s=0.0) == "written"
    with pytest.raises(OSError, match=error.strerror):
        until_written(fails(10**9, error), within_s=0.05, pause_s=0.0)
    with pytest.raises(OSError, match="Input/output"):
        until_written(fails(1, OSError(errno.EIO, "Input/output error")), pause_s=0.0)


def test_who_waits_for_the_file_system_may_tell_of_it_himself(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Exception] = []
    assert until_written(fails(2), pause_s=0.0, refused=told.append) == "written"
    assert told == [FULL, FULL] and not caplog.records
    with pytest.raises(OSError, match="No space"):
        until_written(fails(1), within_s=-1.0, refused=told.append)
    assert len(told) == 2, "what is not tried again is raised"


def test_what_is_large_leaves_what_was_given_up_to_records(tmp_path: Path) -> None:
    kept, tries = Reserve(tmp_path, SIZE), []
    kept.fill()
    assert kept.give_way(lambda: tries.append(1)) == ""
    assert kept.give_way(fails(1, READ_ONLY)) == str(READ_ONLY)
    assert kept.give_way(fails(1)) == str(FULL) and not kept.given_up, "only records may spend it"
    assert kept.give_way(fails(1, OSError(errno.EIO, "Input/output error"))) == "[Errno 5] Input/output error"
    with pytest.raises(PermissionError):
        kept.give_way(fails(1, PermissionError(errno.EACCES, "Permission denied")))
    kept.give_up()
    assert kept.give_way(lambda: tries.append(2)) == reserve.GIVEN_UP and tries == [1]


def test_a_shortage_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "free_bytes", lambda _: 2**27)
    assert shortage(tmp_path) == f"0.12 GiB free in {tmp_path}, a run needs 0.25 GiB"
    assert shortage(tmp_path, 2**27) == "" == shortage(tmp_path / "none", 0)


def test_events_wait_in_memory_for_space_and_none_is_cut_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = tmp_path / "run" / "attempts" / "1"
    journal = Journal(attempt, "agent-1")
    path = attempt / "events" / "agent-1.jsonl"
    journal.write(AgentStarted("before", ""))
    opened = Path.open

    class Half:
        """A disk on which half a line fits."""

        def __init__(self, path: Path) -> None:
            self._file = opened(path, "a+b", buffering=0)

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, text: bytes) -> None:
            self._file.write(text[: len(text) // 2])
            raise FULL

    def halved(self: Path, *args: Any, **options: Any) -> Any:
        return Half(self) if self == path else opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", halved)
    before = path.stat().st_size
    for node in ("first", "second"):
        journal.write(AgentStarted(node, ""))
    assert path.stat().st_size == before
    monkeypatch.undo()
    journal.flush()
    journal.flush()
    nodes = [line.split(b'"node": "')[1].split(b'"')[0] for line in whole_lines(path)]
    assert nodes == [b"before", b"first", b"second"]
