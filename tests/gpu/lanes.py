"""What runs beside what on a machine's GPUs: lanes of tests, each in a process of its own with GPUs for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

ALONE = 0
"""As a number of GPUs: all that there are, and nothing beside."""
Share = Literal["module", "function", "parameters"]


@dataclass
class Lane:
    """Tests that run in one process, one after the other.

    Attributes:
        name: which is also that of its log.
        gpus: how many it needs, or ALONE.
        memory_gb: that it needs of each.
        minutes: that it takes beside others, about.
        tests: their ids.
    """

    name: str
    gpus: int
    memory_gb: float
    minutes: float
    tests: list[str] = field(default_factory=list)


def lanes_of(items: Iterable[pytest.Item]) -> list[Lane]:
    """Put tests into lanes, as their mark `gpus` says, the longest first; those that run alone come last.

    A test without that mark needs one GPU and little of it, and shares its lane with its module.
    """
    found: dict[str, Lane] = {}
    for item in items:
        mark = item.get_closest_marker("gpus")
        lane = _lane(item.nodeid, *(mark.args if mark else ()), **(mark.kwargs if mark else {}))
        found.setdefault(lane.name, lane).tests.append(item.nodeid)
    return sorted(found.values(), key=lambda lane: (lane.gpus == ALONE, -lane.minutes, -lane.gpus * lane.memory_gb))


def _lane(nodeid: str, count: int = 1, memory_gb: float = 3, lane: Share = "module", minutes: float = 2) -> Lane:
    module, _, test = nodeid.rpartition("/")[2].partition("::")
    own = {"module": "", "function": test.partition("[")[0], "parameters": test}[lane]
    name = f"{module.removesuffix('.py').removeprefix('test_')}-{own.removeprefix('test_')}"
    return Lane("".join(c if c.isalnum() else "-" for c in name).strip("-"), count, memory_gb, minutes)


class Pool:
    """GPUs of one machine, and how much of their memory is not given away."""

    def __init__(self, memory_gb: Sequence[float]) -> None:
        self._free = list(memory_gb)
        self._whole = tuple(memory_gb)

    def take(self, lane: Lane) -> tuple[int, ...] | None:
        """Take the GPUs with most memory left. None: there is no room now."""
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
        """Take a lane's share back."""
        for gpu in gpus:
            self._free[gpu] += self._share(lane, gpu)

    def _share(self, lane: Lane, gpu: int) -> float:
        return self._whole[gpu] if lane.gpus == ALONE else lane.memory_gb

    def could_ever(self, lane: Lane) -> bool:
        """Whether there would be room for a lane if it had the machine for itself."""
        return lane.gpus <= len(self._whole) and lane.memory_gb <= min(self._whole, default=0)
