"""Files of a deployment's tenants: their recipes, what the user wants of them, their runs, and API keys.

    RUN/tenants/NAME/tenant.yaml  wanted  state.json  host.log  run/
    RUN/keys/USER                                                    mode 0600
    RUN/keys/tenant.NAME

Commands write `wanted`, and the tenant host makes it true. The Tinker service reads the keys.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Literal, get_args

import msgspec

from primeslurm.base import durable, files
from primeslurm.records.reading import find_record
from primeslurm.run.directory import RunDirectory

Wanted = Literal["running", "paused", "removed"]
# File in a tenant's run directory: the sessions that have stored its checkpoints in the Tinker service.
SESSIONS_FILE = "tinker_sessions.json"
_WANTED: tuple[Wanted, ...] = get_args(Wanted)


class TenantState(msgspec.Struct, frozen=True):
    """State of a tenant, which the tenant host records."""

    state: str = "waiting"
    """waiting (for the host), starting, running, stopping, back-off, paused, completed, or removed."""
    reason: str = ""
    failures: int = 0  # consecutive ends without a new checkpoint
    time: float = 0.0  # Unix time at which the state began


class TenantDirectory:
    """One tenant: `RUN/tenants/NAME/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.recipe_file = path / "tenant.yaml"
        self.log = path / "host.log"
        self.run = RunDirectory(path / "run")

    @property
    def wanted(self) -> Wanted:
        """The state that the last command asks for."""
        text = files.read_text(self.path / "wanted").strip()
        return next((word for word in _WANTED if word == text), "paused")

    @property
    def wanted_since(self) -> float:
        """Unix time of the last command about it."""
        status = files.status(self.path / "wanted")
        return status.st_mtime if status else 0.0

    def want(self, wanted: Wanted) -> None:
        durable.write(self.path / "wanted", wanted)

    def state(self) -> TenantState:
        return find_record(self.path / "state.json", TenantState) or TenantState()

    def record(self, state: TenantState) -> None:
        files.write_json(self.path / "state.json", msgspec.to_builtins(state))


def tenants_of(run_dir: Path) -> list[TenantDirectory]:
    """Return all tenants of a deployment, the oldest first. Removed ones are among them."""
    added = []
    for path in files.listing(run_dir / "tenants"):
        if path.name[0] != "." and (status := files.status(path / "tenant.yaml")) is not None:
            added.append((status.st_mtime, path.name, path))
    return [TenantDirectory(path) for *_, path in sorted(added)]


def add_tenant(run_dir: Path, name: str, recipe: str) -> TenantDirectory | None:
    """Add a tenant, which is wanted to run. Return None if there is one of that name. Raises OSError."""
    target = run_dir / "tenants" / name
    staged = target.with_name(f".{name}.{secrets.token_hex(6)}")
    durable.make_directory(staged, 0o700)
    try:
        durable.write(staged / "tenant.yaml", recipe)
        TenantDirectory(staged).want("running")
        try:
            staged.rename(target)
        except OSError:
            if files.exists(target):
                return None
            raise
    finally:
        files.remove_tree(staged, ignore_errors=True)
    durable.sync(target.parent)
    return TenantDirectory(target)


def user_of(tenant: str) -> str:
    """Return the user that a tenant's run is to the Tinker service. Names of clients have no dots."""
    return f"tenant.{tenant}"


def read_key(run_dir: Path, user: str) -> str:
    """Return a user's API key. Raises OSError, for example if there is none."""
    return files.read_text(run_dir / "keys" / user)


def key_of(run_dir: Path, user: str) -> str:
    """Return a user's API key. It is made if there is none. Raises OSError."""
    path = run_dir / "keys" / user
    durable.make_directory(path.parent, 0o700)
    if not files.exists(path):
        staged = path.with_name(f".{user}.{secrets.token_hex(6)}")
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"tml-{secrets.token_urlsafe(24)}")
        durable.sync(staged)
        with contextlib.suppress(FileExistsError):  # another command was faster
            os.link(staged, path)
        staged.unlink()
        durable.sync(path.parent)
    return read_key(run_dir, user)


def keys(run_dir: Path) -> dict[str, str]:
    """Return the user of each API key."""
    users = {}
    for path in files.listing(run_dir / "keys"):
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):  # the other users must not suffer
            if path.name[0] != "." and (key := files.read_text(path)):
                users[key] = path.name
    return users


def remove_key(run_dir: Path, user: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        durable.remove(run_dir / "keys" / user)
