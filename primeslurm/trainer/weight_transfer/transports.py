"""The two transports of `weights.transport`, as the RL loop sees them: by files, or in sessions with engines."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weight_transfer.publisher import Publisher
from primeslurm.trainer.weight_transfer.sender import Sender
from primeslurm.wire.link import TrainerLink
from primeslurm.wire.weight_transfer import filesystem


class WeightTransfer(Protocol):
    """All ranks call each method together. All raise RankError if a disk, the orchestrator or a rank failed."""

    def resume(self, version: int) -> None:
        """Make engines take `version`, which a checkpoint was loaded from; 0 is the model they have loaded."""

    def transfer(self, version: int) -> float:
        """Make engines take `version`, which was just trained. Returns the seconds for which it was sent."""

    def repeat(self, version: int) -> None:
        """Transfer `version` again, to engines that came since and wait for it."""


class FilesystemTransfer:
    """Publishes every version; engines read it, whenever they come."""

    def __init__(self, publisher: Publisher, run_dir: Path, model: str, link: TrainerLink, world: World) -> None:
        self._publisher = publisher
        self._run_dir = run_dir
        self._model = model
        self._link = link
        self._world = world
        self._announced = 0
        """Engines may read any version up to this one: it stays as it is, also when its step is repeated."""

    def resume(self, version: int) -> None:
        """Publish `version` again only if its files are gone or damaged."""
        if version and not self._publisher.is_sound(version):
            self._publisher.publish(version)
        self._announce(version, str(filesystem.version_dir(self._run_dir, version)) if version else self._model)
        self._publisher.discard_after(self._announced)

    def transfer(self, version: int) -> float:
        """Publish the version, then announce it."""
        if version > self._announced:
            self._announce(version, str(self._publisher.publish(version)))
        return 0.0

    def repeat(self, version: int) -> None:
        """Do nothing: the files are there."""

    def _announce(self, version: int, path: str) -> None:
        self._announced = self._world.decide(self._link.announce(version, path) if self._world.is_main else 0)


class CollectiveTransfer:
    """Sends every version to engines directly. Publishes only the last one, as what the run has made."""

    def __init__(
        self, sender: Sender, publisher: Publisher, last: int, model: str, link: TrainerLink, world: World
    ) -> None:
        self._sender = sender
        self._publisher = publisher
        self._last = last
        self._model = model
        self._link = link
        self._world = world

    def resume(self, version: int) -> None:
        """Send what the checkpoint holds."""
        self._publisher.discard_after(version)
        if version:
            self._announce_and_send(version)
        elif self._world.is_main:
            self._link.announce(0, self._model)

    def transfer(self, version: int) -> float:
        """Send the version to all engines that are up."""
        self._announce_and_send(version)
        return self._sender.seconds

    def repeat(self, version: int) -> None:
        """Send the version again."""
        self._sender.send(version)

    def _announce_and_send(self, version: int) -> None:
        if self._world.is_main:
            self._link.announce(version, "")
        self._sender.send(version)
        if version == self._last:
            self._publisher.publish(version)
