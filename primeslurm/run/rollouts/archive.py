"""`RolloutArchive`: lists the rollouts of a run, and reads single ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.records import rollout_files
from primeslurm.records.rollout_files import ArchiveFile, DamagedFileError, FileName
from primeslurm.records.rollouts import RolloutSummary, RolloutTranscript
from primeslurm.run.directory import Attempt
from primeslurm.run.history import last_trained
from primeslurm.run.rollouts.query import RolloutQuery


class RolloutPage(msgspec.Struct, frozen=True):
    """A part of a list of rollouts."""

    rollouts: list[RolloutSummary]
    total: int  # rollouts that the query admits, on all pages
    problems: list[str] = []  # files that cannot be read, and why


# Reads one rollout of a file by its id. Raises DamagedFileError or OSError.
RolloutReader = Callable[[str], RolloutTranscript]


class RolloutArchive:
    """The rollouts of one run, finished or live.

    An instance remembers the heads of files that it has read, so a repeated `page` only reads new files. Use one
    instance from one thread at a time.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._directory = run_dir / rollout_files.DIRECTORY
        self._files: dict[FileName, ArchiveFile] = {}
        self._problems: dict[str, str] = {}
        self._last_trained: dict[int, int | None] = {}
        self._followed: set[FileName] = set()

    def page(
        self, query: RolloutQuery | None = None, *, offset: int = 0, limit: int | None = 100, newest: bool = True
    ) -> RolloutPage:
        """Return summaries that a query admits, in the order of their steps."""
        query = query or RolloutQuery()
        end = None if limit is None else offset + limit
        rollouts: list[RolloutSummary] = []
        total = 0
        for _, summaries in self._sources(query, newest=newest):
            for summary in reversed(summaries) if newest else summaries:
                if query.admits(summary):
                    if total >= offset and (end is None or total < end):
                        rollouts.append(self._shown(summary))
                    total += 1
        return RolloutPage(rollouts, total, self.problems)

    @property
    def problems(self) -> list[str]:
        """Files and rollouts that the last call could not read, and why."""
        return sorted(self._problems.values())

    def transcripts(
        self, query: RolloutQuery | None = None, *, limit: int | None = None
    ) -> Iterator[RolloutTranscript]:
        """Yield the rollouts that a query admits, newest first. Those that cannot be read are noted as problems."""
        query = query or RolloutQuery()
        remaining = math.inf if limit is None else limit
        for reader, summaries in self._sources(query, newest=True):
            for summary in reversed(summaries):
                if remaining > 0 and query.admits(summary):
                    remaining -= 1
                    try:
                        yield self._transcript(reader, summary.id)
                    except (DamagedFileError, OSError) as error:
                        self._problems[summary.id] = f"rollout {summary.id}: {error}"

    def fresh(self, query: RolloutQuery | None = None) -> list[RolloutSummary]:
        """Return summaries that a query admits, oldest first, of archive files that no earlier call has read."""
        query = query or RolloutQuery()
        names = [name for name in _names(files.listing(self._directory)) if name not in self._followed]
        self._followed.update(names)
        self._last_trained.clear()
        return [self._shown(each) for name in names for each in self._summaries(name) if query.admits(each)]

    def get(self, id: str) -> RolloutTranscript:
        """Read one rollout.

        Args:
            id: its id, or a part of it that no other rollout has.

        Raises:
            RunError: there is no such rollout, there are several, or its file cannot be read.
        """
        matches: dict[str, RolloutReader] = {}
        for reader, summaries in self._sources(RolloutQuery(), newest=True):
            for summary in summaries:
                if summary.id == id:
                    return self._read(reader, id)
                if id in summary.id:
                    matches.setdefault(summary.id, reader)
        if len(matches) == 1:
            ((full, reader),) = matches.items()
            return self._read(reader, full)
        if matches:
            names = ", ".join(list(matches)[:3])
            raise RunError(f"{len(matches)} rollouts of {self._run_dir.name} have {id!r} in their id, such as {names}")
        raise RunError(f"no rollout {id!r} of {self._run_dir.name} was kept (primeslurm rollouts {self._run_dir.name})")

    def _read(self, reader: RolloutReader, id: str) -> RolloutTranscript:
        try:
            return self._transcript(reader, id)
        except (DamagedFileError, OSError) as error:
            raise RunError(f"rollout {id!r} cannot be read: {error}") from error

    def _transcript(self, reader: RolloutReader, id: str) -> RolloutTranscript:
        transcript = reader(id)
        return msgspec.structs.replace(transcript, summary=self._shown(transcript.summary))

    def _shown(self, summary: RolloutSummary) -> RolloutSummary:
        """Return a summary as `batched` if its attempt has not trained the step of its batch."""
        if summary.state != "trained" or summary.step is None:
            return summary
        if summary.attempt not in self._last_trained:
            attempt = Attempt(self._run_dir, summary.attempt)
            self._last_trained[summary.attempt] = last_trained(attempt) if files.is_dir(attempt.path) else None
        last = self._last_trained[summary.attempt]
        return summary if last is None or summary.step <= last else msgspec.structs.replace(summary, state="batched")

    def _sources(self, query: RolloutQuery, *, newest: bool) -> Iterator[tuple[RolloutReader, list[RolloutSummary]]]:
        """Yield a reader of each file that a query may admit, with its summaries, in order. Notes damaged files."""
        self._problems.clear()
        self._last_trained.clear()
        paths = files.listing(self._directory)
        names = _names(paths)
        logprobs: dict[str, list[Path]] = {}
        for path in paths:
            logprobs.setdefault(rollout_files.logprobs_stem(path.name), []).append(path)
        for name in reversed(names) if newest else names:
            if query.steps is None or query.steps[0] <= name.step <= query.steps[1]:
                summaries = self._summaries(name)
                if summaries:
                    of_trainer = logprobs.get(name.stem, []) if name.kind == "batch" else []
                    yield partial(self._files[name].read, trainer=of_trainer), summaries

    def _summaries(self, name: FileName) -> list[RolloutSummary]:
        """Return the summaries of a file; none if it cannot be read."""
        try:
            if name not in self._files:
                self._files[name] = rollout_files.open_file(self._directory / str(name))
            return self._files[name].summaries()
        except FileNotFoundError:  # removed meanwhile, because the archive is full
            return []
        except (DamagedFileError, OSError) as error:
            self._problems[str(name)] = f"{name}: {error}"
            return []


def _names(paths: Iterable[Path]) -> list[FileName]:
    names = (rollout_files.parse_name(path.name) for path in paths)
    return sorted(name for name in names if name is not None)
