"""The interrupt signal: on SIGUSR1 the trainer ends its step, saves a checkpoint and exits with code 75 (requeue)."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNAL = signal.SIGUSR1
_KEY = "interrupt"


class Interrupt:
    """Receives the interrupt signal on a thread of its own, and shares it with the other ranks.

    Create it before any other thread exists, because new threads inherit the blocked signal.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._store: Any = None
        # A Python signal handler runs only after the main thread returns from a collective. A rank that waits for
        # rank 0 may never return. So all threads block the signal, and one thread waits for it with sigwait.
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        threading.Thread(target=self._wait, name="interrupt", daemon=True).start()

    def share(self, store: Any) -> None:
        """Exchange interrupts with the other ranks through a TCPStore client, which nothing else may use."""
        self._store = store
        if self._event.is_set():
            store.set(_KEY, "1")

    def requested(self) -> bool:
        """Return whether this rank or a rank that shares the store was interrupted."""
        return self._event.is_set() or (self._store is not None and self._store.check([_KEY]))

    def _wait(self) -> None:
        signal.sigwait({SIGNAL})
        self._event.set()
        if self._store is not None:
            self._store.set(_KEY, "1")
