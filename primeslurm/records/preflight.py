"""What a look at a node found, and what nodes compare themselves with: `preflight.json`."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    level: Level
    text: str
    fix: str = ""


class Reference(msgspec.Struct, frozen=True):
    """`preflight.json`: what the head's own node looks like to it, for the others to compare."""

    plan_digest: str
    packages: dict[str, str | None]
