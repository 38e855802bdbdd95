"""State that survives a restart: API keys, sessions, training runs and checkpoints."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.tinker.requests import LoraConfig, RequestError

FILE = "tinker.sqlite"
SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
# Names that clients give to kinds of checkpoints
KINDS = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
# Checkpoints that only one sampling session uses. They are removed with their session, and are in no list.
_SAMPLING = "sampling"
EPHEMERAL = f"{SCHEME}{_SAMPLING}/"
# The user of the first key.
FIRST_USER = "default"
_TABLES = (
    "keys (key TEXT PRIMARY KEY, created REAL)",
    "sessions (id TEXT PRIMARY KEY, created REAL, ended TEXT)",
    "runs (id TEXT PRIMARY KEY, session TEXT, created REAL, model TEXT, lora TEXT)",
    "checkpoints (path TEXT PRIMARY KEY, run TEXT, created REAL)",
)
# Columns that data directories of earlier versions lack. `metadata` is a JSON object.
_COLUMNS = (
    f"keys ADD user TEXT NOT NULL DEFAULT '{FIRST_USER}'",
    f"sessions ADD user TEXT NOT NULL DEFAULT '{FIRST_USER}'",
    "sessions ADD metadata TEXT",
    "sessions ADD name TEXT",
    "runs ADD metadata TEXT",
    "checkpoints ADD metadata TEXT",
    "checkpoints ADD expires REAL",
)
_CHECKPOINTS = f"""
FROM checkpoints JOIN runs ON runs.id = checkpoints.run JOIN sessions ON sessions.id = session
WHERE (expires IS NULL OR expires > ?) AND path NOT LIKE '{EPHEMERAL}%'
"""
_RUNS = "FROM runs JOIN sessions ON sessions.id = session WHERE user = ?"
Metadata = Mapping[str, object] | None


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter."""

    file: Path
    model: str
    lora: LoraConfig


class TinkerStore:
    """The database and the files in the data directory. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Open or create the data directory. Raises UsageError if another service uses it."""
        self._directory = directory
        durable.make_directory(directory, 0o700)
        (directory / FILE).touch(0o600)
        # sqlite3 serializes the threads that share a connection. Without transactions, each statement is one.
        self._db = sqlite3.connect(directory / FILE, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("BEGIN EXCLUSIVE")
            for table in _TABLES:
                self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            for column in _COLUMNS:
                with contextlib.suppress(sqlite3.OperationalError):  # there is that column
                    self._db.execute(f"ALTER TABLE {column}")
            self.key(FIRST_USER)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._db.close()
            why = f"cannot be used: {error}; only one service may use it at a time"
            raise UsageError([Violation("--data", str(directory), why)]) from None

    def key(self, user: str) -> str:
        """Return a user's key. It is made if there is none."""
        new = (f"tml-{secrets.token_urlsafe(24)}", time.time(), user, user)
        query = (
            "INSERT INTO keys (key, created, user) SELECT ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM keys WHERE user = ?)"
        )
        self._db.execute(query, new)
        key: str = self._db.execute("SELECT key FROM keys WHERE user = ?", (user,)).fetchone()[0]
        return key

    def add_session(
        self, user: str, metadata: Metadata = None, name: str | None = None, session: str | None = None
    ) -> str:
        session = session or secrets.token_hex(8)
        query = "INSERT OR IGNORE INTO sessions (id, created, user, metadata, name) VALUES (?, ?, ?, ?, ?)"
        self._db.execute(query, (session, time.time(), user, _json(metadata), name))
        return session

    def sessions(self, user: str, limit: int, offset: int) -> list[str]:
        """Return a user's sessions, the newest first."""
        query = "SELECT id FROM sessions WHERE user = ? ORDER BY rowid DESC LIMIT ? OFFSET ?"
        return [session for (session,) in self._db.execute(query, (user, limit, offset))]

    def session(self, session: str, user: str) -> tuple[str | None, str | None, list[str]]:
        """Return the name, metadata as JSON, and training runs of a session. Raises RequestError if there is none."""
        row = self._db.execute(
            "SELECT name, metadata FROM sessions WHERE id = ? AND user = ?", (session, user)
        ).fetchone()
        if row is None:
            raise RequestError("session_id", session, "is unknown", 404)
        runs = self._db.execute("SELECT id FROM runs WHERE session = ? ORDER BY rowid", (session,))
        return row[0], row[1], [run for (run,) in runs]

    def end_session(self, session: str, reason: str) -> None:
        self._db.execute("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", (reason, session))

    def owner(self, session: str) -> str | None:
        """Return the user of a session, even if it has ended. None: it is unknown."""
        row = self._db.execute("SELECT user FROM sessions WHERE id = ?", (session,)).fetchone()
        return row[0] if row else None

    def check_session(self, session: str) -> str:
        """Return the user of a session. Raises RequestError if it is unknown or has ended."""
        row = self._db.execute("SELECT ended, user FROM sessions WHERE id = ?", (session,)).fetchone()
        if row is None:
            raise RequestError("session_id", session, "is unknown", 404)
        if row[0] is not None:
            raise RequestError("session_id", session, f"has ended: {row[0]}", 410)
        user: str = row[1]
        return user

    def add_run(self, run: str, session: str, model: str, lora: LoraConfig, metadata: Metadata = None) -> None:
        """Add a training run. Raises RequestError if there was one of that id."""
        query = "INSERT INTO runs (id, session, created, model, lora, metadata) VALUES (?, ?, ?, ?, ?, ?)"
        try:
            self._db.execute(query, (run, session, time.time(), model, lora.model_dump_json(), _json(metadata)))
        except sqlite3.IntegrityError:
            raise RequestError("model_seq_id", run, "has ended, because the service restarted", 410) from None

    def has_run(self, run: str) -> bool:
        return self._db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is not None

    def runs(self, user: str, limit: int, offset: int) -> tuple[list[str], int]:
        """Return a user's training runs, the newest first, and how many there are without the limit."""
        rows = self._db.execute(
            f"SELECT runs.id {_RUNS} ORDER BY runs.rowid DESC LIMIT ? OFFSET ?", (user, limit, offset)
        )
        return [run for (run,) in rows], self._db.execute(f"SELECT COUNT(*) {_RUNS}", (user,)).fetchone()[0]

    def run(self, run: str, user: str) -> dict[str, object]:
        """Describe a training run as clients expect it. Raises RequestError with status 404 if there is none."""
        query = f"SELECT model, lora, runs.created, runs.metadata {_RUNS} AND runs.id = ?"
        row = self._db.execute(query, (user, run)).fetchone()
        if row is None:
            raise RequestError("training_run_id", run, "there is no such training run", 404)
        model, lora, created, metadata = row
        saved, _ = self.checkpoints(user, run)
        return {
            "training_run_id": run,
            "base_model": model,
            "model_owner": user,
            "is_lora": True,
            "lora_rank": LoraConfig.model_validate_json(lora).rank,
            "last_request_time": max([_date(created), *(str(each["time"]) for each in saved)]),
            "last_checkpoint": next((each for each in saved if each["checkpoint_type"] == KINDS[TRAINING]), None),
            "last_sampler_checkpoint": next(
                (each for each in saved if each["checkpoint_type"] == KINDS[SAMPLER]), None
            ),
            "user_metadata": metadata and json.loads(metadata),
        }

    def file(self, path: str) -> Path:
        """Return the file of a checkpoint, or its directory if it is external, whether or not there is one."""
        name = path.removeprefix(SCHEME)
        return self._directory / "checkpoints" / (name if f"/{EXTERNAL}/" in name else f"{name}.safetensors")

    @property
    def adapters(self) -> Path:
        """Directory of adapters for engines: those of sampling sessions, and external checkpoints.

        The name of an external checkpoint's adapter is its path without SCHEME.
        """
        return self._directory / "checkpoints"

    def new_adapter(self, session: str) -> tuple[str, Path]:
        """Return an unused name for the adapter of a sampling session, and its directory."""
        client, _, rest = session.partition(":")
        # Engines keep the weights of a name, so none is used twice.
        name = f"{_SAMPLING}/{client}/{rest}-{secrets.token_hex(4)}"
        return name, self.adapters / name

    def remove_adapters(self, session: str | None = None) -> None:
        """Remove the adapters of a client's sampling sessions. None: those of all clients."""
        clients = files.listing(self.adapters / _SAMPLING) if session is None else [self.adapters / _SAMPLING / session]
        for directory in clients:
            if files.is_dir(directory):
                files.remove_tree(directory)

    def add_checkpoint(self, path: str, run: str, ttl: int | None = None, metadata: Metadata = None) -> None:
        """Record a checkpoint whose file is on disk. It expires after `ttl` seconds (None: never)."""
        query = "INSERT OR REPLACE INTO checkpoints (path, run, created, expires, metadata) VALUES (?, ?, ?, ?, ?)"
        now = time.time()
        self._db.execute(query, (path, run, now, None if ttl is None else now + ttl, _json(metadata)))

    def has_checkpoint(self, path: str) -> bool:
        """Return whether there is a checkpoint, even if it has expired and is only kept for its users."""
        return self._db.execute("SELECT 1 FROM checkpoints WHERE path = ?", (path,)).fetchone() is not None

    def checkpoint(self, path: str, user: str, expired: bool = False) -> SavedAdapter:
        """Return a user's checkpoint. Raises RequestError with status 404 if there is none.

        `expired` also returns one that has expired and is not removed yet.
        """
        query = f"SELECT model, lora {_CHECKPOINTS} AND path = ? AND user = ?"
        row = self._db.execute(query, (0 if expired else time.time(), path, user)).fetchone()
        if row is None:
            raise RequestError("path", path, "there is no such checkpoint", 404)
        return SavedAdapter(self.file(path), row[0], LoraConfig.model_validate_json(row[1]))

    def checkpoints(
        self, user: str, run: str | None = None, limit: int = -1, offset: int = 0
    ) -> tuple[list[dict[str, object]], int]:
        """Describe a user's named checkpoints, the newest first. Also return how many there are without the limit."""
        where = f"{_CHECKPOINTS} AND user = ? AND ifnull(checkpoints.run = ?, 1)"
        values = (time.time(), user, run)
        query = f"SELECT path, checkpoints.created, expires, checkpoints.metadata {where}"
        rows = self._db.execute(f"{query} ORDER BY checkpoints.rowid DESC LIMIT ? OFFSET ?", (*values, limit, offset))
        described = [self._describe(*row) for row in rows.fetchall()]
        return described, self._db.execute(f"SELECT COUNT(*) {where}", values).fetchone()[0]

    def _describe(self, path: str, created: float, expires: float | None, metadata: str | None) -> dict[str, object]:
        kind, name = path.removeprefix(SCHEME).split("/")[1:]
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": KINDS[kind],
            "time": _date(created),
            "tinker_path": path,
            "size_bytes": sum(status.st_size for file in self.files(path) if (status := files.status(file))),
            "user_metadata": metadata and json.loads(metadata),
            "expires_at": expires and _date(expires),
        }

    def files(self, path: str) -> list[Path]:
        """Return the files of a checkpoint."""
        file = self.file(path)
        return sorted(files.listing(file)) if files.is_dir(file) else [file]

    def set_ttl(self, path: str, ttl: int | None) -> None:
        """Let a checkpoint expire in `ttl` seconds. None: never."""
        expires = None if ttl is None else time.time() + ttl
        self._db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def remove_expired(self, used: Collection[str | None]) -> None:
        """Remove the checkpoints that have expired, except those in `used`."""
        rows = self._db.execute("SELECT path FROM checkpoints WHERE expires <= ?", (time.time(),))
        for (path,) in rows.fetchall():
            if path not in used:
                self._remove(path)

    def remove_checkpoints(self, prefix: str) -> None:
        """Remove the checkpoints whose paths start with `prefix`."""
        query = "SELECT path FROM checkpoints WHERE substr(path, 1, ?) = ?"
        for (path,) in self._db.execute(query, (len(prefix), prefix)).fetchall():
            self._remove(path)

    def _remove(self, path: str) -> None:
        self.remove_files(path)  # first: if it fails, the record remains, and a later call removes both
        self._db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def remove_files(self, path: str) -> None:
        """Remove the files of a checkpoint that is not recorded."""
        if files.is_dir(self.file(path)):
            files.remove_tree(self.file(path))
        else:
            durable.remove(self.file(path))

    def close(self) -> None:
        self._db.close()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _json(value: Metadata) -> str | None:
    return json.dumps(value) if value else None
