"""Shared memory of killed processes is removed, and nothing else."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from primeslurm.node.host.shared_memory import SharedMemory, mapped_by, names_of

MAP = (
    "import mmap, sys, time\n"
    "file = open(sys.argv[1], 'w+b'); file.truncate(4096); mapped = mmap.mmap(file.fileno(), 0)\n"
    "print('mapped', flush=True); time.sleep(600)"
)
SEMAPHORE = (
    "import multiprocessing, time\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "print('mapped', flush=True); time.sleep(600)"
)


@pytest.fixture
def name(tmp_path: Path) -> Iterator[Path]:
    path = Path(f"/dev/shm/primeslurm-test-{tmp_path.name}-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def start(code: str, *args: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def killed(process: subprocess.Popen[str]) -> SharedMemory:
    """Return the files that a process mapped before it was killed."""
    memory = SharedMemory()
    memory.scan([process.pid])
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    memory.ended(process.pid)
    return memory


def test_maps_with_undecodable_names_are_read(name: Path, tmp_path: Path) -> None:
    """Any process of the user may map such a file, so all are scanned before a removal."""
    other = start(MAP, os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    process = start(MAP, str(name))
    try:
        assert mapped_by([other.pid]) == {other.pid: set()}
        memory = killed(process)
        assert memory.unlink() and not name.exists()
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


def test_files_of_a_killed_process_are_removed(name: Path) -> None:
    process = start(MAP, str(name))
    memory = killed(process)
    assert name.exists()
    assert memory.unlink()
    assert not name.exists()


def test_semaphores_are_found_by_inode() -> None:
    process = start(SEMAPHORE)
    mapped = mapped_by([process.pid])[process.pid]
    memory = killed(process)
    [left] = names_of(mapped)
    assert left.name.startswith("sem.mp-")
    assert memory.unlink()
    assert not left.exists()


def test_files_mapped_by_other_processes_stay(name: Path) -> None:
    process = start(MAP, str(name))
    with name.open("r+b") as file:
        other = mmap.mmap(file.fileno(), 0)
    memory = killed(process)
    assert not memory.unlink()
    assert not memory.unlink_within(0.0)
    assert name.exists()
    Timer(0.1, other.close).start()
    assert memory.unlink_within(60.0)
    assert not name.exists()


def test_files_that_the_group_did_not_map_stay(name: Path) -> None:
    name.write_bytes(b"somebody else's")
    process = start(SEMAPHORE)
    memory = killed(process)
    assert memory.unlink()
    assert name.exists()
