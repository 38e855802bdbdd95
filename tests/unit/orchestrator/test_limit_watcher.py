"""Programs cannot hide their processes or memory from the watcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from primeslurm.node.host.process_condition import condition_of
from primeslurm.orchestrator.environments.sandbox.limit_watcher import measure_usage, proportional_memory

HIDING = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.prctl(15, ctypes.c_char_p(bytes.fromhex(sys.argv[1])), 0, 0, 0)  # PR_SET_NAME
held = b"1" * 40_000_000
if child := os.fork():
    os.wait()
print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "name",
    [b"usual", b"\xff\xfe", b") R 1 2 (", b"a b\n1 2", b"\xe2\x98"],
    ids=["usual", "bytes", "stat", "lines", "half"],
)
def test_processes_are_counted_whatever_their_names(name: bytes) -> None:
    process = subprocess.Popen([sys.executable, "-c", HIDING, name.hex()], stdout=-1, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"there\n"
        (use,) = measure_usage([process.pid]).values()
        assert len(use.pids) == 2 and use.threads == 2 and use.resident > 80_000_000
        assert 40_000_000 < proportional_memory(use) < use.resident
        assert not condition_of(process.pid).stopped
    finally:
        os.killpg(process.pid, 9)
        process.wait()
