"""State that survives a restart: the API key, sessions, training runs and checkpoints."""

from __future__ import annotations

import secrets
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from primeslurm.base import durable
from primeslurm.base.errors import UsageError, Violation
from primeslurm.tinker.requests import LoraConfig, RequestError

FILE = "tinker.sqlite"
SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
_TABLES = """
CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, created REAL);
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, created REAL, ended TEXT);
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, session TEXT, created REAL, model TEXT, lora TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, run TEXT, created REAL);
"""


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
            self._db.executescript(_TABLES)
            self._db.execute("INSERT INTO keys SELECT ?, ? WHERE NOT EXISTS (SELECT 1 FROM keys)", self._new_key())
        except sqlite3.Error as error:
            self._db.close()
            why = f"cannot be used: {error}; only one service may use it at a time"
            raise UsageError([Violation("--data", str(directory), why)]) from None

    @property
    def keys(self) -> list[str]:
        return [key for (key,) in self._db.execute("SELECT key FROM keys ORDER BY created")]

    def add_session(self) -> str:
        session = secrets.token_hex(8)
        self._db.execute("INSERT INTO sessions VALUES (?, ?, NULL)", (session, time.time()))
        return session

    def end_session(self, session: str, reason: str) -> None:
        self._db.execute("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", (reason, session))

    def check_session(self, session: str) -> None:
        """Raise RequestError if a session is unknown or has ended."""
        row = self._db.execute("SELECT ended FROM sessions WHERE id = ?", (session,)).fetchone()
        if row is None:
            raise RequestError("session_id", session, "is unknown", 404)
        if row[0] is not None:
            raise RequestError("session_id", session, f"has ended: {row[0]}", 410)

    def add_run(self, run: str, session: str, model: str, lora: LoraConfig) -> None:
        """Add a training run. Raises RequestError if there was one of that id."""
        try:
            self._db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?)", (run, session, time.time(), model, lora.model_dump_json())
            )
        except sqlite3.IntegrityError:
            raise RequestError("model_seq_id", run, "has ended, because the service restarted", 410) from None

    def has_run(self, run: str) -> bool:
        return self._db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is not None

    def file(self, path: str) -> Path:
        """Return the file of a checkpoint, whether or not there is one."""
        return self._directory / "checkpoints" / f"{path.removeprefix(SCHEME)}.safetensors"

    def add_checkpoint(self, path: str, run: str) -> None:
        """Record a checkpoint whose file is on disk."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (path, run, time.time()))

    def has_checkpoint(self, path: str) -> bool:
        return self._db.execute("SELECT 1 FROM checkpoints WHERE path = ?", (path,)).fetchone() is not None

    def checkpoint(self, path: str) -> SavedAdapter:
        """Return a checkpoint. Raises RequestError with status 404 if there is none."""
        query = "SELECT model, lora FROM checkpoints JOIN runs ON runs.id = run WHERE path = ?"
        row = self._db.execute(query, (path,)).fetchone()
        if row is None:
            raise RequestError("path", path, "there is no such checkpoint", 404)
        return SavedAdapter(self.file(path), row[0], LoraConfig.model_validate_json(row[1]))

    def remove_checkpoints(self, prefix: str) -> None:
        """Remove the checkpoints whose paths start with `prefix`."""
        query = "DELETE FROM checkpoints WHERE substr(path, 1, ?) = ? RETURNING path"
        for (path,) in self._db.execute(query, (len(prefix), prefix)).fetchall():
            durable.remove(self.file(path))

    def close(self) -> None:
        self._db.close()

    @staticmethod
    def _new_key() -> tuple[str, float]:
        return f"tml-{secrets.token_urlsafe(24)}", time.time()
