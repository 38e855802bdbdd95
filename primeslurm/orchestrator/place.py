"""Where an orchestrator runs, and its neighbours: what its command line says besides the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where this orchestrator runs and whom it talks to."""

    run_dir: Path
    attempt: int
    run_id: str
    bind: str
    env_bind: str
    routers: Sequence[str]
    engines: Mapping[str, str]
    """URL by process name."""

    @property
    def attempt_dir(self) -> Path:
        """Directory of this attempt."""
        return self.run_dir / "attempts" / str(self.attempt)
