"""Limit on the bytes of results that workers send at once, over all connections, like TCP's receive window.

ZMQ buffers everything that peers send. The rollouts of a group end together, and all their results would wait in memory
in small chunks, which the allocator keeps after they are joined and freed: for 16 rollouts of 80 MB, 1.3 GB besides the
joined results.
"""

from __future__ import annotations

WINDOW = 256 << 20  # bytes in flight: three of the longest rollouts, so the next results arrive while one is joined


class ReceiveWindow:
    """Selects the results to request: the oldest that fit into the window besides those in flight."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._offered: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}

    def offer(self, job: str, size: int) -> None:
        """Add a result that a worker has, or one to be requested again."""
        self._in_flight.pop(job, None)
        self._offered.setdefault(job, size)

    def forget(self, job: str) -> None:
        """Remove a result that has arrived or never will."""
        self._offered.pop(job, None)
        self._in_flight.pop(job, None)

    def admit(self) -> list[str]:
        """Return the jobs whose results to request now. A result larger than the window is requested alone."""
        admitted: list[str] = []
        free = self._size - sum(self._in_flight.values())
        for job, size in self._offered.items():
            if size > free and (self._in_flight or admitted):
                break
            admitted.append(job)
            free -= size
        self._in_flight |= {job: self._offered.pop(job) for job in admitted}
        return admitted
