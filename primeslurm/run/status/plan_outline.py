"""Outline of a plan: nodes, processes and replicas, read from plan.json without validating the whole plan.

The plan was validated at submission. For a thousand nodes, validating it again takes longer than the rest of `status`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.plan.plan_file import plain
from primeslurm.run.directory import Attempt


class ProcessOutline(msgspec.Struct, frozen=True):
    """A process and its node."""

    name: str
    role: str
    node: int
    log: str
    restart: str
    replica: int | None = None


class NodeOutline(msgspec.Struct, frozen=True):
    """A node and its processes."""

    index: int
    group: int
    role: str
    processes: list[ProcessOutline] = []


class ReplicaOutline(msgspec.Struct, frozen=True):
    """An inference deployment and its router."""

    index: int
    router: str
    engines: list[str]


class PlanOutline(msgspec.Struct, frozen=True):
    """Nodes and replicas of a plan."""

    run: str
    run_dir: str
    task: str
    executor: str
    nodes: list[NodeOutline]
    replicas: list[ReplicaOutline]
    emulated: bool = False
    device: str = "cuda"

    def processes(self) -> Iterator[ProcessOutline]:
        """Iterate over all processes, in node order."""
        return (process for node in self.nodes for process in node.processes)


def read_outline(attempt: Attempt) -> PlanOutline:
    """Read the outline of an attempt's plan. Raises RunError if there is no readable plan."""
    path = attempt.plan_file
    try:
        about = files.status(path)
        if about is None:
            raise FileNotFoundError(f"{path} does not exist")
        return _outline(path, (about.st_ino, about.st_size, about.st_mtime_ns))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


# Programs that watch a run read its plan, which rarely changes, every second.
@functools.lru_cache(maxsize=16)
def _outline(path: Path, version: tuple[int, int, int]) -> PlanOutline:
    return msgspec.convert(plain(files.read_bytes(path)), PlanOutline)
