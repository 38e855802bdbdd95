"""API keys in files, which commands add and remove while the service runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path

from primeslurm.run import tenants

log = logging.getLogger(__name__)
# Interval at which the files are read [s].
FRESH_S = 2.0


class KeyFiles(Mapping[str, str]):
    """The user of each API key of a deployment. A new or removed key counts within `fresh_s`.

    A thread reads the files, so that requests never wait for the storage. While it stalls, the keys stay as they were.
    """

    def __init__(self, run_dir: Path, fresh_s: float = FRESH_S) -> None:
        self._run_dir, self._fresh_s = run_dir, fresh_s
        self._users = tenants.keys(run_dir)
        self._closed = threading.Event()
        threading.Thread(target=self._read, name="tinker-keys", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _read(self) -> None:
        while not self._closed.wait(self._fresh_s):
            try:
                self._users = tenants.keys(self._run_dir)
            except (OSError, ValueError) as error:
                log.warning("API keys of %s are not read: %s", self._run_dir, error)

    def items(self) -> ItemsView[str, str]:
        """Return the keys and users of one moment."""
        return self._users.items()

    def __getitem__(self, key: str) -> str:
        return self._users[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def __len__(self) -> int:
        return len(self._users)
