"""A node's installed software: `node.preflight.installed` prints it, `slurm.inventory` reads it."""

from __future__ import annotations

import msgspec


class InstalledParts(msgspec.Struct, frozen=True):
    """Versions of the software on one node, which the node prints as a line of JSON."""

    node: str
    parts: dict[str, str | None]  # version of each part by name; None: not installed
