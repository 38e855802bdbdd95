"""The rendezvous port is taken by the time rank 0 has imported torch."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from primeslurm.wire.transport import rendezvous


def gate() -> rendezvous._Gate:
    return rendezvous._Gate(1, b"", b"key")


def listening() -> tuple[socket.socket, int]:
    found = socket.create_server(("127.0.0.1", 0))
    return found, found.getsockname()[1]


def test_gate_waits_for_its_port(caplog: pytest.LogCaptureFixture) -> None:
    other, port = listening()
    threading.Timer(1.5, other.close).start()
    assert rendezvous._run(gate().open("127.0.0.1", port)) == port
    assert f"is taken by process {os.getpid()}" in caplog.text


def test_error_names_the_process_at_the_port() -> None:
    other, port = listening()
    with other, pytest.raises(OSError, match=f"127.0.0.1:{port}.* is taken by process {os.getpid()}"):
        rendezvous._run(gate().open("127.0.0.1", port, taken_s=0.0))
