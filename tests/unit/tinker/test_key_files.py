"""API keys of a deployment's users."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.run import tenants
from primeslurm.tinker.key_files import KeyFiles
from tests.support.waiting import wait_until


@pytest.fixture
def users(tmp_path: Path) -> Iterator[KeyFiles]:
    users = KeyFiles(tmp_path, fresh_s=0.01)
    yield users
    users.close()


def test_keys_come_and_go_while_the_service_runs(users: KeyFiles, tmp_path: Path) -> None:
    assert dict(users) == {}
    alice = tenants.key_of(tmp_path, "alice")
    wait_until(lambda: dict(users.items()) == {alice: "alice"}, poll_s=0.01)
    tenants.remove_key(tmp_path, "alice")
    bob = tenants.key_of(tmp_path, "bob")
    wait_until(lambda: dict(users.items()) == {bob: "bob"}, poll_s=0.01)
    assert tenants.key_of(tmp_path, "bob") == bob


def test_keys_stay_as_they_were_while_the_storage_stalls_or_fails(
    users: KeyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tenants.key_of(tmp_path, "alice")
    wait_until(lambda: len(users) == 1, poll_s=0.01)
    stalled, go, failed = threading.Event(), threading.Event(), threading.Event()

    def keys(_: Path) -> dict[str, str]:
        if stalled.is_set():
            failed.set()
        stalled.set()
        assert go.wait(600)
        raise OSError("the storage failed")

    monkeypatch.setattr(tenants, "keys", keys)
    assert stalled.wait(600)
    assert dict(users.items()) == {key: "alice"}, "requests do not wait"
    go.set()
    assert failed.wait(600), "the files are read again"
    assert dict(users.items()) == {key: "alice"}
