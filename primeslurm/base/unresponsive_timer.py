"""For how long a process has been silent, without the time for which it cannot be blamed. Pure."""

from __future__ import annotations

MAX_GAP_S = 2.0
"""Two looks further apart than this count as so far apart: whoever looks was held up, and mostly not alone."""


def scheduling_delay_s(last: float, now: float) -> float:
    """Tell for how many seconds whoever had its last turn at `last` was held up: nobody was silent for that."""
    return max(0.0, now - last - MAX_GAP_S)


class UnresponsiveTimer:
    """Counts the seconds since a process was last heard of, one look after the other.

    Only time in which somebody looked counts: a machine that stands still, or an agent that was stopped, makes nobody
    silent. What the process itself could not help is taken off.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of silence, at the last look."""
        self._looked_at: float | None = None
        self._heard: int | None = None

    def look(self, now: float, heard: int, excused_s: float = 0.0) -> float:
        """Take in a look.

        Args:
            now: any clock, in seconds; it may jump.
            heard: a number that changes whenever the process says something.
            excused_s: since the last look the process could do nothing for so long: it waited for a CPU or a disk, or
                a debugger held it.

        Returns:
            The seconds of silence so far.
        """
        if heard != self._heard or self._looked_at is None:
            self.seconds = 0.0
        else:
            self.seconds += max(0.0, min(now - self._looked_at, MAX_GAP_S) - max(0.0, excused_s))
        self._heard, self._looked_at = heard, now
        return self.seconds
