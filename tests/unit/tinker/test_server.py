"""Start of the service, up to its open port and data directory."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import stat
from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.tinker.server import prepare
from primeslurm.tinker.store import _TABLES, FILE, FIRST_USER, TinkerStore


def test_one_service_uses_a_data_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    keys = []
    for _ in range(2):  # a new directory, and an existing one
        server = prepare("127.0.0.1", 0, data, ["other"])
        keys.append(server.keys)
        with pytest.raises(UsageError, match="only one service may use it at a time"):
            prepare("127.0.0.1", 0, data)
        server.listener.close()
        server.store.close()
    assert keys[0] == keys[1] and len(set(keys[0].values())) == 2
    assert all(key.startswith("tml-") for key in keys[0].values()), "clients refuse other keys"
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


def test_data_directory_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as database:
        for table in _TABLES:
            database.execute(f"CREATE TABLE {table}")
        database.execute("INSERT INTO keys VALUES ('tml-old', 1)")
        database.execute("INSERT INTO sessions VALUES ('s', 1, NULL)")
        database.execute("""INSERT INTO runs VALUES ('r', 's', 1, 'model', '{"rank": 4}')""")
        database.execute("INSERT INTO checkpoints VALUES ('tinker://r/weights/one', 'r', 1)")
        database.commit()
    store = TinkerStore(tmp_path)
    assert store.key(FIRST_USER) == "tml-old" and store.sessions(FIRST_USER, 10, 0) == ["s"]
    assert store.run("r", FIRST_USER)["last_checkpoint"]["tinker_path"] == "tinker://r/weights/one"  # type: ignore[index]
    store.close()
