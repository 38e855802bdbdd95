"""API keys of a deployment's users."""

from __future__ import annotations

from pathlib import Path

from primeslurm.run import tenants
from primeslurm.tinker.key_files import FRESH_S, KeyFiles


def test_keys_come_and_go_while_the_service_runs(tmp_path: Path) -> None:
    now = [0.0]
    users = KeyFiles(tmp_path, lambda: now[0])
    assert dict(users) == {}
    alice = tenants.key_of(tmp_path, "alice")
    assert dict(users) == {}, "files are not read for each request"
    now[0] += FRESH_S
    assert dict(users) == {alice: "alice"}
    tenants.remove_key(tmp_path, "alice")
    bob = tenants.key_of(tmp_path, "bob")
    now[0] += FRESH_S
    assert dict(users) == {bob: "bob"} and tenants.key_of(tmp_path, "bob") == bob
