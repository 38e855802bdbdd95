"""Start of the service, up to its open port and data directory."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.tinker.server import prepare
from primeslurm.tinker.store import FILE


def test_one_service_uses_a_data_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    keys = []
    for _ in range(2):  # a new directory, and an existing one
        server = prepare("127.0.0.1", 0, data)
        keys.append(server.key)
        with pytest.raises(UsageError, match="only one service may use it at a time"):
            prepare("127.0.0.1", 0, data)
        server.listener.close()
        server.store.close()
    assert keys[0] == keys[1] and keys[0].startswith("tml-"), "clients refuse other keys"
    assert stat.S_IMODE((data / FILE).stat().st_mode) == 0o600


def test_port_in_use_is_an_error(tmp_path: Path) -> None:
    server = prepare("127.0.0.1", 0, tmp_path / "one")
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"--port = {port}: cannot listen on 127.0.0.1"):
        prepare("127.0.0.1", port, tmp_path / "other")
    server.listener.close()
    server.store.close()


def test_address_that_clients_cannot_use_is_replaced(tmp_path: Path) -> None:
    server = prepare("0.0.0.0", 0, tmp_path / "data")
    assert server.url == f"http://{socket.gethostname()}:{server.listener.getsockname()[1]}"
    server.listener.close()
    server.store.close()
