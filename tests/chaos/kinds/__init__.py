"""All kinds of faults. Schedules depend on their order, so new ones come last."""

from __future__ import annotations

from tests.chaos.kinds.fault_effect import Kind
from tests.chaos.kinds.files import FILES
from tests.chaos.kinds.nodes import NODES
from tests.chaos.kinds.processes import PROCESSES

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*PROCESSES, *NODES, *FILES)}


def switched_on() -> list[str]:
    """Return the names of the kinds in schedules."""
    return [kind.name for kind in KINDS.values() if not kind.off]
