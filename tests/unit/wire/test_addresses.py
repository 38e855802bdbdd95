"""Addresses by process name, which follow the published file."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primeslurm.base.files import FileWatcher, write_json
from primeslurm.wire.transport.addresses import FILE, AddressBook, unreachable


def publish(directory: Path, host: str, lost: list[str]) -> None:
    ports = {"router-0": {"http": 8000}}
    write_json(directory / FILE, {"hosts": {"router-0": host}, "ports": ports, "lost": lost})


def test_address_book_checks_its_file_once_a_second(tmp_path: Path) -> None:
    now = [0.0]
    book = AddressBook(tmp_path, lambda: now[0])
    with pytest.raises(LookupError, match="has not been published"):
        book.url("router-0")
    publish(tmp_path, "10.0.0.1", [])
    assert book.url("router-0") == "http://10.0.0.1:8000"
    publish(tmp_path, "10.0.0.2", ["engine-r1-0"])
    assert (book.url("router-0"), book.lost) == ("http://10.0.0.1:8000", frozenset())
    now[0] = 1.0
    assert (book.url("router-0"), book.lost) == ("http://10.0.0.2:8000", {"engine-r1-0"})
    with pytest.raises(LookupError):
        book.url("router-9")


@pytest.mark.parametrize("number", [0, 255, 70_000])
def test_unreachable_addresses_differ_and_refuse_connections_at_once(number: int) -> None:
    host, ports = unreachable(number, ("http", "nixl"))
    assert host != unreachable(number + 1, ())[0] and ports["http"] != ports["nixl"]
    for port in ports.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))


def test_watched_file_is_read_once_per_change(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    file = FileWatcher(path)
    assert file.changed() is None
    write_json(path, {"a": 1})
    assert file.changed() == {"a": 1}
    assert file.changed() is None
    path.write_text('{"a": ')  # written by another program
    assert file.changed() is None
    write_json(path, {"a": 2})
    assert file.changed() == {"a": 2}


def test_concurrent_writers_leave_a_whole_file(tmp_path: Path) -> None:
    path, values = tmp_path / "x.json", [{"text": character * 10000} for character in "abcdefgh" * 5]
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(lambda value: write_json(path, value), values):
            assert FileWatcher(path).changed() in values
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
