"""`RolloutArchive`: lists the rollouts of a run, and reads single ones."""

from __future__ import annotations

from pathlib import Path

import msgspec

from primeslurm.base.errors import RunError
from primeslurm.records.rollouts import RolloutSummary, RolloutTranscript
from primeslurm.run.rollouts.query import RolloutQuery


class RolloutPage(msgspec.Struct, frozen=True):
    """A part of a list of rollouts."""

    rollouts: list[RolloutSummary]
    total: int  # rollouts that the filter admits, on all pages
    problems: list[str] = []  # files that cannot be read, and why


class RolloutArchive:
    """The rollouts of one run, finished or live.

    An instance remembers the summaries of files that it has read, so a repeated `page` only reads new files. Use one
    instance from one thread at a time.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def page(
        self, query: RolloutQuery | None = None, *, offset: int = 0, limit: int | None = 100, newest: bool = True
    ) -> RolloutPage:
        """Return summaries that a filter admits, sorted by step and time.

        Args:
            query: default: all rollouts.
            offset: number of rollouts to skip.
            limit: largest number of rollouts to return; None: all.
            newest: newest rollouts first, or oldest first.
        """
        return RolloutPage([], 0)

    def get(self, id: str) -> RolloutTranscript:
        """Read one rollout.

        Args:
            id: its id, or the beginning of an id that no other rollout has.

        Raises:
            RunError: there is no such rollout, there are several, or its file cannot be read.
        """
        raise RunError(f"{self._run_dir.name} has no rollout {id}")
