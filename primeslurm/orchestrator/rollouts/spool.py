"""Finished groups on disk, `<run>/rollouts/<group>.group`, so that a kill loses none of them.

Of a group that is on disk the head is known; its rollouts are read when they are needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from primeslurm.base import durable, files
from primeslurm.orchestrator.rollouts.groups import (
    PREFIX,
    GroupHead,
    RolloutGroup,
    decode_head,
    digest_of,
    has_head,
    head_size,
)
from primeslurm.wire.batches.file_ranges import FileRange, StoredArray
from primeslurm.wire.batches.rollouts import Rollout
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import DamagedError

log = logging.getLogger(__name__)
SUFFIX = ".group"


class SpooledGroup(RolloutGroup):
    """Says what the head says. Each look at anything else reads the whole file: see `whole`.

    Args:
        path: of its file.
        head: of it.
    """

    def __init__(self, path: Path, head: GroupHead) -> None:
        info = head.info
        known = {"id": info.id, "environment": info.environment, "example": info.example, "task": info.task}
        known |= {"opened_version": info.opened_version, "_path": path, "_head": head}
        self.__dict__.update(known)

    _path: Path
    _head: GroupHead

    @property
    def rollouts(self) -> tuple[tuple[Rollout, ...], ...]:
        """Read the rollouts. Raises DamagedError."""
        return self.whole().rollouts

    @property
    def size(self) -> int:
        """Return how many rollouts it has."""
        return len(self._head.info.branches)

    @property
    def given_rewards(self) -> list[float]:
        """See `RolloutGroup`."""
        return self._head.given_rewards

    @property
    def scored(self) -> bool:
        """See `RolloutGroup`."""
        return self._head.scored

    @property
    def newest_version(self) -> int:
        """See `RolloutGroup`."""
        return self._head.newest_version

    def whole(self) -> RolloutGroup:
        """Read it, and check all of it. It may take seconds.

        Raises:
            DamagedError: it cannot be read, or is not what its head says.
        """
        return self._decoded(self._read())

    def experts_apart(self) -> tuple[RolloutGroup, list[StoredArray | None]]:
        """Read and check all of it, as `whole`, and keep all but routed experts, which are nearly all of it.

        Returns:
            The group without them, and where those of each of its sequences are; None where there are none.
        """
        data = self._read()
        group, first = self._decoded(data), np.frombuffer(data, np.uint8).ctypes.data
        return group.slim(), [self._stored(sequence.routed_experts, first) for sequence in group.sequences]

    def _stored(self, array: RoutedExperts | None, first: int) -> StoredArray | None:
        """Where an array is in the file whose bytes are in memory from the address `first` on."""
        if array is None:
            return None
        start = array.ctypes.data - first
        return StoredArray(FileRange(self._path, start, start + array.nbytes), array.dtype, array.shape)

    def _read(self) -> memoryview:
        try:
            return memoryview(files.read_bytes(self._path))
        except OSError as error:
            raise DamagedError(str(error)) from error

    def _decoded(self, data: memoryview) -> RolloutGroup:
        if digest_of([data[len(data) - self._head.size :]]) != self._head.digest:
            raise DamagedError("its rollouts are not what was written")
        group = RolloutGroup.from_bytes(data)
        if group.head(self._head.size, self._head.digest) != self._head:
            raise DamagedError("its rollouts are not those that its head tells of")
        return group


def open_group(path: Path) -> RolloutGroup:
    """Read the head of a spool file; all of a file of an older release, which has none.

    Raises:
        DamagedError: it is damaged, as far as was looked.
        OSError: it cannot be read.
    """
    return files.reading(path, lambda file: _opened(path, file))


def _opened(path: Path, file: BinaryIO) -> RolloutGroup:
    size = os.fstat(file.fileno()).st_size
    first = file.read(4096)
    if first and not has_head(first):
        return RolloutGroup.from_bytes(path.read_bytes())
    end = PREFIX + head_size(first[:PREFIX])
    if end > size:
        raise DamagedError(f"{size} bytes, of which the head alone would be {end}")
    while len(first) < end and (more := file.read(end - len(first))):
        first += more
    head = decode_head(first[PREFIX:end])
    if end + head.size != size:
        raise DamagedError(f"{size} bytes of {end + head.size}")
    if not head.info.branches:
        raise DamagedError("a group without rollouts")
    return SpooledGroup(path, head)


class Spool:
    """One file per finished group. On a full or read-only file system they wait in memory until put again.

    Another fault of the disk costs durability, never the run: the group then lives in memory only.
    """

    def __init__(self, directory: Path) -> None:
        durable.make_directory(directory)
        self._directory = directory
        self.waiting: dict[str, RolloutGroup] = {}
        """By id; they are not on disk."""
        self.damaged: dict[str, str] = {}
        """Why a file cannot be used, by its group's id, as far as the file's name says it. `delete` sets it aside."""

    def put(self, group: RolloutGroup) -> bool:
        """Persist a group.

        Returns:
            False if that was not possible: it is in memory only, and `waiting` if the file system may take it later.
        """
        waited = self.waiting.pop(group.id, None)
        self.damaged.pop(group.id, None)
        try:
            path = self._path(group.id)
            why = durable.write_bulk(path, lambda: durable.write(path, group.to_parts()))
        except OSError as error:
            log.warning("group %s stays in memory only: %s", group.id, error)
            return False
        if why:
            self.waiting[group.id] = group
            if waited is None:  # or every try would say so
                log.warning("group %s waits in memory: %s", group.id, why)
        return not why

    def load(self, expected: Iterable[str] = ()) -> list[RolloutGroup]:
        """Open all groups, by name: only heads are read. Files without a readable one are `damaged`.

        Args:
            expected: ids of groups that are on record, whose files this node may not see yet: they are waited for.

        Raises:
            OSError: the directory or a file cannot be read. That damages no group: another attempt may read it.
        """
        paths = {*files.settled_listing(self._directory, f"*{SUFFIX}"), *map(self._path, expected)}
        groups: dict[Path, RolloutGroup] = {}
        wrong: dict[Path, Exception] = {}

        def look() -> bool | None:
            wrong.clear()
            for path in paths - groups.keys():
                try:
                    groups[path] = self._open(path)
                except (FileNotFoundError, DamagedError) as error:
                    wrong[path] = error
            return None if wrong else True

        files.until_seen(look, self._directory)
        for path, error in sorted(wrong.items()):
            if files.exists(path):
                self.note_damaged(path.name.removesuffix(SUFFIX), error)
        return [group for _, group in sorted(groups.items())]

    def _open(self, path: Path) -> RolloutGroup:
        group = open_group(path)
        if self._path(group.id) != path:
            raise DamagedError(f"it is of group {group.id[:80]!r}")
        return group

    def on_disk(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return a group with its rollouts on disk alone; None if they are not there."""
        if isinstance(group, SpooledGroup):
            return group
        try:
            found = open_group(self._path(group.id))
        except (OSError, DamagedError):
            return None
        return found if isinstance(found, SpooledGroup) and found.scored == group.scored else None

    def note_damaged(self, name: str, why: Exception) -> None:
        """Have a group's file set aside when the group is deleted: until then, a restart finds it again."""
        log.warning("group %s cannot be read, is set aside, and its example comes again: %s", name, why)
        self.damaged[name] = str(why)

    def delete(self, ids: Iterable[str]) -> None:
        """Remove groups; those not on disk are ignored, and damaged ones are set aside."""
        for name in ids:
            self.waiting.pop(name, None)
            path = self._path(name)
            if (why := self.damaged.pop(name, None)) is None:
                files.unlink(path)
            elif files.exists(path):
                files.write_atomic(path.with_suffix(".damaged.txt"), f"{why}\n")
                files.rename(path, path.with_suffix(".damaged"))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace('/', '_')}{SUFFIX}"
