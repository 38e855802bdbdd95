"""The orchestrator's place in the run: its directory, its addresses, and the processes it talks to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from primeslurm.wire.transport.addresses import AddressBook


@dataclass(frozen=True)
class OrchestratorArguments:
    """The options of the orchestrator's command line, except the recipe. Routers, engines and teachers are names."""

    run_dir: Path
    attempt: int
    run_id: str
    bind: str
    env_bind: str
    routers: Sequence[str]
    engines: Sequence[str]
    teachers: Sequence[str] = ()

    @property
    def attempt_dir(self) -> Path:
        return self.run_dir / "attempts" / str(self.attempt)

    @cached_property
    def addresses(self) -> AddressBook:
        """Return the current addresses of routers and engines."""
        return AddressBook(self.attempt_dir)

    def engine_urls(self) -> dict[str, str]:
        """Return the URL of every engine that the head has not given up."""
        return {name: self.addresses.url(name) for name in self.engines if name not in self.addresses.lost}

    def teacher_urls(self) -> list[str]:
        """Return the URLs of the teacher's engines that are assigned to a node."""
        urls = []
        for name in self.teachers:
            with suppress(LookupError):
                urls.append(self.addresses.url(name))
        return urls
