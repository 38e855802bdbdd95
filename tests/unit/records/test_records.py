"""Records and events: reading back, other releases, and damaged files."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.records import attempt, evaluation, fleet, state
from primeslurm.records.attempt import LockRecord
from primeslurm.records.events import KINDS, decode, in_order
from primeslurm.records.events.nodes import AgentFailed, AgentStarted
from primeslurm.records.events.processes import ProcessStarted
from primeslurm.records.events.training import StepTrained
from primeslurm.records.fleet import FleetView
from primeslurm.records.journal import Journal
from primeslurm.records.reading import find_record, last_lines, read_record
from primeslurm.records.record import Record
from primeslurm.records.state import TrainerState
from tests.support.faulty_storage import FaultyStorage
from tests.support.golden import assert_golden


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 1.0, "process": "head", "kind": "of a newer release", "name": "x"}',
        b'{"time": 1.0, "process": "head", "kind": "exited"}',
        b'{"time": 1.0, "process": "head", "kind": "exited", "name": 3}',
        b'{"time": 1.0, "process": "head"}',
        b'{"time": 1.0, "process": "head", "kind": "exi',
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
    ],
)
def test_damaged_and_unknown_events_are_skipped(line: bytes) -> None:
    assert decode(line) is None


def test_a_new_field_is_ignored_and_a_missing_one_has_a_default() -> None:
    line = b'{"time": 1.0, "process": "agent-0", "kind": "started", "name": "router-0", "cores": [1, 2]}'
    assert decode(line) == ProcessStarted("router-0", time=1.0, process="agent-0")


@settings(deadline=None)
@given(st.floats(), st.text(st.characters(categories=["L", "Cs"])), st.none() | st.floats())
def test_events_and_states_are_read_back(seconds: float, error: str, loss: float | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(Path(directory), "p")
        journal.write(StepTrained(1, loss))
        journal.write(AgentFailed(error))
        journal.state(TrainerState(1, "train", {"train": seconds}))
        lines = (Path(directory) / "events" / "p.jsonl").read_bytes().splitlines()
        state = find_record(Path(directory) / "state" / "p.json", TrainerState)
    step, failed = (decode(line) for line in lines)
    assert isinstance(step, StepTrained) and isinstance(failed, AgentFailed) and state is not None
    assert (repr(step.loss), failed.error, repr(state.seconds["train"])) == (repr(loss), error, repr(seconds))


def test_events_are_sorted_and_those_without_time_dropped() -> None:
    late, early = AgentFailed("b", time=2.0), AgentFailed("a", time=1.0)
    assert in_order([late, AgentFailed("c"), early]) == [early, late]


def test_missing_incomplete_and_wrong_records(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    assert read_record(path, FleetView) is None
    path.write_text('{"time": 1.')
    assert read_record(path, FleetView) is None, "half a file on a shared file system is not there yet"
    path.write_text('{"time": 1.0, "states": {"a": "HEALTHY"}, "of a newer release": 3}')
    assert read_record(path, FleetView) == FleetView(1.0, states={"a": "HEALTHY"})
    path.write_text('{"states": {}}')
    assert find_record(path, FleetView) is None
    with pytest.raises(msgspec.ValidationError, match="missing required field `time`"):
        read_record(path, FleetView)
    path.write_text("{}")
    assert read_record(path, LockRecord) == LockRecord()


def test_the_end_of_a_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert last_lines(path) == []
    path.write_bytes(b"one\ntwo\nthree\nfo")
    assert last_lines(path) == [b"one", b"two", b"three"]
    assert last_lines(path, size=9) == [b"three"]


THREADS = """
import sys, threading
import msgspec
from primeslurm.records.reading import changed_record

class File:
    def changed(self):
        return {f"part{i}": {} for i in range(50)}

def read(kind, barrier):
    barrier.wait()
    changed_record(File(), kind)

sys.setswitchinterval(1e-6)
for turn in range(30):
    parts = [(f"part{i}", msgspec.defstruct(f"Part{turn}_{i}", [("number", int, 0)])) for i in range(50)]
    kind = msgspec.defstruct(f"Record{turn}", parts)
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=read, args=(kind, barrier)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_read_the_first_record_of_a_kind_concurrently() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_events_on_a_full_disk_are_written_later_in_order(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "attempts" / "1"
    journal, path = Journal(directory, "agent-1"), directory / "events" / "agent-1.jsonl"
    journal.write(AgentStarted("before", ""))
    size = path.stat().st_size
    with FaultyStorage(tmp_path, lambda operation, _: errno.ENOSPC if operation == "write" else None).installed():
        journal.write(AgentStarted("first", ""))
        journal.write(AgentStarted("second", ""))
    assert path.stat().st_size == size
    journal.flush()
    journal.flush()
    events = [decode(line) for line in path.read_bytes().splitlines()]
    assert [event.node for event in events if isinstance(event, AgentStarted)] == ["before", "first", "second"]


def test_names_of_fields_on_disk_do_not_change() -> None:
    """Other releases and programs of users read these fields. Add new fields and kinds here."""
    modules = (attempt, evaluation, fleet, state)
    kinds = [*KINDS, *(kind for module in modules for kind in vars(module).values() if isinstance(kind, type))]
    fields = {
        kind.__struct_config__.tag or kind.__name__: list(kind.__struct_encode_fields__)
        for kind in kinds
        if issubclass(kind, msgspec.Struct) and kind.__module__ != Record.__module__
    }
    lines = [f"{name}: {' '.join(names)}" for name, names in sorted(fields.items())]
    assert_golden("record_fields.txt", "\n".join(lines))
