"""The little of a Plan that watching a run needs, read without validating the whole of it.

The plan was validated when it was made. For a thousand nodes, validating it again takes longer than everything else
that `status` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.plan.plan_file import plain
from primeslurm.run.directory import Attempt


class PlacedProcess(msgspec.Struct, frozen=True):
    """A process and where it belongs."""

    name: str
    role: str
    node: int
    log: str
    restart: str
    replica: int | None = None


class PlacedNode(msgspec.Struct, frozen=True):
    """A node and what it runs."""

    index: int
    group: int
    role: str
    processes: list[PlacedProcess] = []


class PlacedReplica(msgspec.Struct, frozen=True):
    """An inference deployment and its router."""

    index: int
    router: str
    engines: list[str]


class RunPlacement(msgspec.Struct, frozen=True):
    """What runs where."""

    run: str
    run_dir: str
    task: str
    executor: str
    nodes: list[PlacedNode]
    replicas: list[PlacedReplica]
    emulated: bool = False

    def processes(self) -> Iterator[PlacedProcess]:
        """Return all processes, in node order."""
        return (process for node in self.nodes for process in node.processes)


def placement_of(attempt: Attempt) -> RunPlacement:
    """Read what runs where in an attempt.

    Raises:
        RunError: there is no readable plan.
    """
    try:
        plan = plain(files.read_bytes(attempt.plan_file))
        return msgspec.convert(plan, RunPlacement)
    except (OSError, ValueError) as error:
        raise RunError(f"{attempt.plan_file} cannot be read: {error}") from None
