"""A node's installed software: `node.preflight.installed` prints it, `slurm.inventory` reads it."""

from __future__ import annotations

import msgspec


class InstalledParts(msgspec.Struct, frozen=True):
    """One line of JSON in the output of a node."""

    node: str
    parts: dict[str, str | None]  # version of each part by name; None: not installed
