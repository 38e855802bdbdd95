"""Finished groups on disk, `<run>/rollouts/<group>.group`, so that a killed orchestrator loses none of them.

Only the heads of groups on disk are in memory. Their rollouts are read when they are needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from primeslurm.base import durable, files
from primeslurm.orchestrator.rollouts.groups import (
    PREFIX_BYTES,
    GroupHead,
    RolloutGroup,
    decode_head,
    digest_of,
    head_size,
)
from primeslurm.wire.batches.file_ranges import FileRange, StoredArray
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import DamagedError

log = logging.getLogger(__name__)
SUFFIX = ".group"
_FIRST_READ_BYTES = 4096  # bytes of the first read of a file, which include most heads


class SpooledGroup(RolloutGroup):
    """A group on disk. Properties that are not in the head read the whole file, see `whole`."""

    def __init__(self, path: Path, head: GroupHead) -> None:
        info = head.info
        fields = {"id": info.id, "environment": info.environment, "example": info.example, "task": info.task}
        fields |= {"opened_version": info.opened_version, "_path": path, "_head": head}
        self.__dict__.update(fields)  # the dataclass is frozen

    _path: Path
    _head: GroupHead

    @property
    def rollouts(self) -> tuple[tuple[Rollout, ...], ...]:
        """Read the rollouts. Raise DamagedError."""
        return self.whole().rollouts

    @property
    def size(self) -> int:
        return len(self._head.info.branches)

    @property
    def given_rewards(self) -> list[float]:
        return self._head.given_rewards

    @property
    def scored(self) -> bool:
        return self._head.scored

    @property
    def newest_version(self) -> int:
        return self._head.newest_version

    def whole(self) -> RolloutGroup:
        """Read and check the whole file, which may take seconds. Raise DamagedError."""
        return self._decoded(self._read())

    def experts_apart(self) -> tuple[RolloutGroup, list[StoredArray | None]]:
        """Read and check the whole file, but keep everything except routed experts, which are large.

        Return the group without routed experts, and for each sequence the place of its experts in the file, if any.
        """
        data = self._read()
        group, address = self._decoded(data), np.frombuffer(data, np.uint8).ctypes.data
        return group.slim(), [self._stored(sequence.routed_experts, address) for sequence in group.sequences]

    def _stored(self, array: RoutedExperts | None, address: int) -> StoredArray | None:
        """Return the place of an array in the file, whose content is in memory at `address`."""
        if array is None:
            return None
        start = array.ctypes.data - address
        return StoredArray(FileRange(self._path, start, start + array.nbytes), array.dtype, array.shape)

    def _read(self) -> memoryview:
        try:
            return memoryview(files.read_bytes(self._path))
        except OSError as error:
            raise DamagedError(str(error)) from error

    def _decoded(self, data: memoryview) -> RolloutGroup:
        if digest_of([data[len(data) - self._head.size :]]) != self._head.digest:
            raise DamagedError("its digest does not match its rollouts")
        group = RolloutGroup.from_bytes(data)
        if group.head(self._head.size, self._head.digest) != self._head:
            raise DamagedError("its head does not match its rollouts")
        return group


def open_group(path: Path) -> SpooledGroup:
    """Read and check the head of a group's file.

    Raise DamagedError if the head is damaged, or the file has another size, and OSError if the file cannot be read.
    """
    return files.reading(path, lambda file: _opened(path, file))


def _opened(path: Path, file: BinaryIO) -> SpooledGroup:
    size = os.fstat(file.fileno()).st_size
    first = file.read(_FIRST_READ_BYTES)
    end = PREFIX_BYTES + head_size(first[:PREFIX_BYTES])
    if end > size:
        raise DamagedError(f"{size} bytes, but the head alone has {end}")
    while len(first) < end and (more := file.read(end - len(first))):
        first += more
    head = decode_head(first[PREFIX_BYTES:end])
    if end + head.size != size:
        raise DamagedError(f"{size} bytes instead of {end + head.size}")
    if not head.info.branches:
        raise DamagedError("a group without rollouts")
    return SpooledGroup(path, head)


class Spool:
    """One file per finished group.

    If the file system is full or read-only, groups wait in memory until they are put again. Another fault of the disk
    does not end the run: the group is then in memory only.
    """

    def __init__(self, directory: Path) -> None:
        durable.make_directory(directory)
        self._directory = directory
        self.waiting: dict[str, RolloutGroup] = {}  # groups that are not on disk yet, by id
        # Why a group's file cannot be used, by the id in the file's name. `delete` sets such files aside.
        self.damaged: dict[str, str] = {}

    def put(self, group: RolloutGroup) -> bool:
        """Write a group to disk. False: it is only in memory; in `waiting` if the disk may accept it later."""
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
            if waited is None:  # log only the first try
                log.warning("group %s waits in memory: %s", group.id, why)
        return not why

    def put_all(self, groups: Sequence[RolloutGroup]) -> None:
        """Write groups to disk, as `put` does, with one flush of the directory for all."""
        if len(groups) > 1:
            contents = {self._path(group.id): group.to_parts() for group in groups}
            with suppress(OSError):  # one by one, because a fault may be that of one file
                if not durable.write_bulk(self._directory, lambda: durable.write_together(contents)):
                    for group in groups:
                        self.waiting.pop(group.id, None)
                        self.damaged.pop(group.id, None)
                    return
        for group in groups:
            self.put(group)

    def load(self, expected: Iterable[str] = ()) -> list[RolloutGroup]:
        """Open all groups, by name. Files without a readable head are added to `damaged`.

        Args:
            expected: Ids of recorded groups. Their files are waited for if this node does not see them yet.

        Raises:
            OSError: The directory or a file cannot be read. No group is damaged then, as another attempt may read it.
        """
        paths = {*files.settled_listing(self._directory, f"*{SUFFIX}"), *map(self._path, expected)}
        groups: dict[Path, RolloutGroup] = {}
        failed: dict[Path, Exception] = {}

        def look() -> bool | None:
            failed.clear()
            for path in paths - groups.keys():
                try:
                    groups[path] = self._open(path)
                except (FileNotFoundError, DamagedError) as error:
                    failed[path] = error
            return None if failed else True

        files.until_seen(look, self._directory)
        for path, error in sorted(failed.items()):
            if files.exists(path):
                self.note_damaged(path.name.removesuffix(SUFFIX), error)
        return [group for _, group in sorted(groups.items())]

    def _open(self, path: Path) -> RolloutGroup:
        group = open_group(path)
        if self._path(group.id) != path:
            raise DamagedError(f"it holds group {group.id[:80]!r}")
        return group

    def on_disk(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return the group with its rollouts only on disk, or None if they are not there."""
        if isinstance(group, SpooledGroup):
            return group
        try:
            spooled = open_group(self._path(group.id))
        except (OSError, DamagedError):
            return None
        return spooled if spooled.scored == group.scored else None

    def note_damaged(self, name: str, why: Exception) -> None:
        """Let a group's file be set aside when the group is deleted. Until then, a restart finds it again."""
        log.warning("group %s cannot be read: its file is set aside, and its example is sampled again: %s", name, why)
        self.damaged[name] = str(why)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete the files of groups, and set damaged ones aside. Groups without a file are ignored."""
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
