"""Where an orchestrator runs, and its neighbours: what its command line says besides the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from primeslurm.wire.transport.addresses import AddressBook


@dataclass(frozen=True)
class OrchestratorArguments:
    """Where this orchestrator runs and whom it talks to."""

    run_dir: Path
    attempt: int
    run_id: str
    bind: str
    env_bind: str
    routers: Sequence[str]
    """Process names, as those of the engines: where they listen is in `addresses`."""
    engines: Sequence[str]
    teachers: Sequence[str] = ()

    @property
    def attempt_dir(self) -> Path:
        """Return the directory of this attempt."""
        return self.run_dir / "attempts" / str(self.attempt)

    @cached_property
    def addresses(self) -> AddressBook:
        """Return the book of where routers and engines listen now."""
        return AddressBook(self.attempt_dir)

    def engine_urls(self) -> dict[str, str]:
        """Return the URL by name of every engine that was not given up."""
        lost = self.addresses.lost
        return {name: self.addresses.url(name) for name in self.engines if name not in lost}

    def teacher_urls(self) -> list[str]:
        """Return the URLs of the teacher's engines, without those that are on no node yet."""
        found = []
        for name in self.teachers:
            with suppress(LookupError):
                found.append(self.addresses.url(name))
        return found
