"""Measures how long a process has sent no heartbeat, without delays that it did not cause."""

from __future__ import annotations

# Longest gap between two checks that counts [s]. A longer one means that the observer itself was delayed.
MAX_GAP_S = 2.0


def scheduling_delay_s(last: float, now: float) -> float:
    """Return for how long an observer that last ran at `last` was delayed. Nobody is unresponsive for that time."""
    return max(0.0, now - last - MAX_GAP_S)


class UnresponsiveTimer:
    """Counts the seconds since the last heartbeat of one process."""

    def __init__(self) -> None:
        self.seconds = 0.0  # seconds without a heartbeat, at the last check
        self._looked_at: float | None = None
        self._heard: int | None = None

    def look(self, now: float, heard: int, excused_s: float = 0.0) -> float:
        """Check the process, and return the seconds without a heartbeat.

        `now` is any clock [s], which may jump. `heard` changes with every heartbeat. `excused_s` is time since the last
        check in which the process could not run: it waited for a CPU or a disk, or a debugger had stopped it.
        """
        # Only time in which the observer was running counts, up to MAX_GAP_S per check: a suspended machine or a
        # stopped agent makes no process unresponsive.
        if heard != self._heard or self._looked_at is None:
            self.seconds = 0.0
        else:
            self.seconds += max(0.0, min(now - self._looked_at, MAX_GAP_S) - max(0.0, excused_s))
        self._heard, self._looked_at = heard, now
        return self.seconds
