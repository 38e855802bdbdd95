"""Assigns GPU tests to lanes, which run in parallel in separate processes, each with its own GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

ALONE = 0
"""Number of GPUs of a lane that needs all of them, with no other lane beside it."""
Share = Literal["module", "function", "parameters"]


@dataclass
class Lane:
    """Tests that run in one process, one after another.

    Attributes:
        name: name of the lane and its log.
        gpus: number of GPUs, or ALONE.
        memory_gb: memory on each GPU.
        minutes: approximate duration beside other lanes.
        tests: test ids.
    """

    name: str
    gpus: int
    memory_gb: float
    minutes: float
    tests: list[str] = field(default_factory=list)


def lanes_of(items: Iterable[pytest.Item]) -> list[Lane]:
    """Put tests into lanes according to their `gpus` marker, the longest first, and those that run alone last.

    A test without the marker needs one GPU with little memory, and shares a lane with its module.
    """
    lanes: dict[str, Lane] = {}
    for item in items:
        mark = item.get_closest_marker("gpus")
        lane = _lane(item.nodeid, *(mark.args if mark else ()), **(mark.kwargs if mark else {}))
        lanes.setdefault(lane.name, lane).tests.append(item.nodeid)
    return sorted(lanes.values(), key=lambda lane: (lane.gpus == ALONE, -lane.minutes, -lane.gpus * lane.memory_gb))


def _lane(nodeid: str, count: int = 1, memory_gb: float = 3, lane: Share = "module", minutes: float = 2) -> Lane:
    module, _, test = nodeid.rpartition("/")[2].partition("::")
    own = {"module": "", "function": test.partition("[")[0], "parameters": test}[lane]
    name = f"{module.removesuffix('.py').removeprefix('test_')}-{own.removeprefix('test_')}"
    return Lane("".join(c if c.isalnum() else "-" for c in name).strip("-"), count, memory_gb, minutes)


class Pool:
    """The GPUs of a machine, and their free memory."""

    def __init__(self, memory_gb: Sequence[float]) -> None:
        self._free = list(memory_gb)
        self._whole = tuple(memory_gb)

    def take(self, lane: Lane) -> tuple[int, ...] | None:
        """Take the GPUs with most free memory; None if there is too little at present."""
        if lane.gpus == ALONE:
            chosen = tuple(range(len(self._free))) if self._free == list(self._whole) else None
        else:
            order = sorted(range(len(self._free)), key=lambda gpu: -self._free[gpu])[: lane.gpus]
            fits = len(order) == lane.gpus and all(self._free[gpu] >= lane.memory_gb for gpu in order)
            chosen = tuple(sorted(order)) if fits else None
        for gpu in chosen or ():
            self._free[gpu] -= self._share(lane, gpu)
        return chosen

    def give_back(self, lane: Lane, gpus: Iterable[int]) -> None:
        """Return a lane's memory."""
        for gpu in gpus:
            self._free[gpu] += self._share(lane, gpu)

    def _share(self, lane: Lane, gpu: int) -> float:
        return self._whole[gpu] if lane.gpus == ALONE else lane.memory_gb

    def could_ever(self, lane: Lane) -> bool:
        """Return whether the lane fits if it has the machine to itself."""
        return lane.gpus <= len(self._whole) and lane.memory_gb <= min(self._whole, default=0)
