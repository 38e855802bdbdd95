"""The rendezvous port is taken by the time rank 0 has imported torch."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from benchmarks.support.ports import free_port
from primeslurm.wire.transport import rendezvous
from tests.support.waiting import wait_until


def gate() -> rendezvous._Gate:
    return rendezvous._Gate(1, b"", b"key")


def listening() -> tuple[socket.socket, int]:
    found = socket.create_server(("127.0.0.1", free_port()))
    return found, found.getsockname()[1]


def test_gate_waits_for_its_port(caplog: pytest.LogCaptureFixture) -> None:
    other, port = listening()

    def close() -> None:
        wait_until(lambda: "is taken" in caplog.text)
        other.close()

    threading.Thread(target=close).start()
    assert rendezvous._run(gate().open("127.0.0.1", port)) == port
    assert f"is taken by process {os.getpid()}" in caplog.text


def test_error_names_the_process_at_the_port() -> None:
    other, port = listening()
    with other, pytest.raises(OSError, match=f"127.0.0.1:{port}.* is taken by process {os.getpid()}"):
        rendezvous._run(gate().open("127.0.0.1", port, taken_s=0.0))
