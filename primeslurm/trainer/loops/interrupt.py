"""SIGUSR1: finish the current step, checkpoint, and leave with exit code 75 so that the job is requeued."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNAL = signal.SIGUSR1
_KEY = "interrupt"


class Interrupt:
    """Notes the signal on a thread of its own, and shares it with rank 0.

    A Python signal handler would wait for the main thread to return from a collective, which may never happen on a rank
    that waits for rank 0. So the signal is blocked everywhere, and one thread takes it.
    Create it before any other thread exists: they inherit the blocked signal.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._store: Any = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        threading.Thread(target=self._wait, name="interrupt", daemon=True).start()

    def share(self, store: Any) -> None:
        """Tell and ask the other ranks through `store`, a client of the job's TCPStore that nothing else uses."""
        self._store = store
        if self._event.is_set():
            store.set(_KEY, "1")

    def requested(self) -> bool:
        """Whether this rank, or another that shares the store, was signalled."""
        return self._event.is_set() or (self._store is not None and self._store.check([_KEY]))

    def _wait(self) -> None:
        signal.sigwait({SIGNAL})
        self._event.set()
        if self._store is not None:
            self._store.set(_KEY, "1")
