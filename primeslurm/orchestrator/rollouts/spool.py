"""Finished groups on disk, `<run>/rollouts/<group>.group`, so that a kill loses none of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from primeslurm import durable
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.records.reserve import Reserve, is_full
from primeslurm.wire.received import DamagedError

log = logging.getLogger(__name__)
SUFFIX = ".group"


class Spool:
    """One file per finished group. What there is no space for waits in memory until it is put again.

    Another fault of the disk costs durability, never the run: the group then lives in memory only.
    """

    def __init__(self, directory: Path) -> None:
        durable.make_directory(directory)
        self._directory = directory
        self._reserve = Reserve(directory.parent)
        self.waiting: dict[str, RolloutGroup] = {}
        """By id; they are not on disk."""

    def put(self, group: RolloutGroup) -> bool:
        """Persist a group.

        Returns:
            False if that was not possible: it is in memory only, and among `waiting` if there was no space.
        """
        self.waiting.pop(group.id, None)
        if self._reserve.given_up:  # what was given up is for records
            self.waiting[group.id] = group
            return False
        try:
            durable.write(self._path(group.id), group.to_parts())
        except OSError as error:
            log.warning("group %s stays in memory only: %s", group.id, error)
            if is_full(error):
                self.waiting[group.id] = group
            return False
        return True

    def load(self) -> list[RolloutGroup]:
        """Read all readable groups, by name. A damaged file is set aside with a warning."""
        groups = []
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                groups.append(RolloutGroup.from_bytes(path.read_bytes()))
            except (OSError, DamagedError) as error:
                log.warning("%s cannot be read and is set aside: %s", path, error)
                path.replace(path.with_suffix(".damaged"))
        return groups

    def delete(self, ids: Iterable[str]) -> None:
        """Remove groups; those not on disk are ignored."""
        for name in ids:
            self.waiting.pop(name, None)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace('/', '_')}{SUFFIX}"
