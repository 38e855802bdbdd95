"""How much comes from environment workers at once: a window of bytes, as TCP has one, over all connections.

ZMQ takes in whatever peers send. Rollouts of a group end together, and would all lie there in pieces, of 60 KiB each,
which the allocator keeps when they are put together and freed: 16 rollouts of 80 MB are 1.3 GB beside what is buffered.
"""

from __future__ import annotations

WINDOW = 256 << 20
"""Bytes on their way, unless one result alone has more: three of the longest rollouts, so that while one of them is put
together the next ones come."""


class ReceiveWindow:
    """Which results may be asked for: the oldest ones that fit beside those that are coming.

    Args:
        size: bytes that may be on their way.
    """

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._offered: dict[str, int] = {}
        self._coming: dict[str, int] = {}

    def offer(self, job: str, size: int) -> None:
        """Note that a worker has a job's result of so many bytes. One that was asked for is asked for again."""
        self._coming.pop(job, None)
        self._offered.setdefault(job, size)

    def forget(self, job: str) -> None:
        """Note that a result has come, or never will."""
        self._offered.pop(job, None)
        self._coming.pop(job, None)

    def admit(self) -> list[str]:
        """Return the jobs whose results are to be asked for now. One that is larger than the window comes alone."""
        admitted: list[str] = []
        free = self._size - sum(self._coming.values())
        for job, size in self._offered.items():
            if size > free and (self._coming or admitted):
                break
            admitted.append(job)
            free -= size
        self._coming |= {job: self._offered.pop(job) for job in admitted}
        return admitted
