"""Decide which published policy versions are whole models, and which are deltas from the last whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Snapshots:
    """Decides how each version is published. It knows only versions of this process, so the first one is whole."""

    must_be_whole: Callable[[int], bool]
    """Returns whether readers other than engines need a version, for example a resumed run."""
    base: int | None = None
    """The newest whole version."""
    base_bytes: int = 0
    delta_bytes: int = 0
    """Bytes of all deltas since `base`."""

    def base_of(self, version: int) -> int | None:
        """Return the version from which `version` is published as a delta. None: publish a whole model."""
        # Deltas grow with the distance from their base, so a new base is due once they have cost as many bytes as one.
        if self.must_be_whole(version) or self.delta_bytes >= self.base_bytes:
            return None
        return self.base if self.base is not None and self.base < version else None

    def published(self, version: int, base: int | None, size: int) -> None:
        """Record that `version` was published as `size` bytes, as a delta from `base` or (None) whole."""
        if base is None:
            self.base, self.base_bytes, self.delta_bytes = version, size, 0
        else:
            self.delta_bytes += size
