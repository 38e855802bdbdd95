"""GPU tests run in parallel, each with its own memory. Some need a whole machine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.__main__ import end
from tests.gpu.lanes import ALONE, Lane, Pool, lanes_of

HERE = Path(__file__).parent
LANE_WITH_A_SERVER = """
import subprocess, sys, time
server = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(server, stdout=subprocess.DEVNULL, start_new_session=True)
try:
    print(1, flush=True)
    time.sleep(600)
finally:
    print(2, flush=True)
"""


class FakeItem:
    """A collected test with an id and markers."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """Return the first marker, which is the closest."""
        return next((mark.mark for mark in self._marks if mark.name == name), None)


def lanes(*items: FakeItem) -> list[Lane]:
    return lanes_of(items)  # type: ignore[arg-type]


def test_tests_of_a_module_share_a_lane() -> None:
    gpus, at = pytest.mark.gpus, "tests/gpu/test_a.py::test_"
    actual = lanes(
        *(FakeItem(f"{at}{name}") for name in ("x[1]", "x[2]", "y")),
        *(FakeItem(f"{at}z[{i}]", gpus(2, 8, lane="function", minutes=5), gpus(3)) for i in range(2)),
        *(FakeItem(f"{at}w[{i}]", gpus(memory_gb=1, lane="parameters")) for i in range(2)),
        FakeItem(f"{at}all", gpus(ALONE)),
    )
    assert [(lane.name, lane.gpus, lane.memory_gb, len(lane.tests)) for lane in actual] == [
        ("a-z", 2, 8, 2),
        ("a", 1, 3, 4),
        ("a-w-0", 1, 1, 1),
        ("a-w-1", 1, 1, 1),
    ]


def test_running_lanes_fit_into_memory() -> None:
    pool = Pool([10.0, 10.0])
    one, two, alone = Lane("one", 1, 6, 1), Lane("two", 2, 4, 1), Lane("alone", ALONE, 4, 1)
    first = pool.take(one)
    assert first is not None and pool.take(alone) is None, "something else runs"
    assert pool.take(two) == (0, 1)
    second = pool.take(one)
    assert second is not None and second != first
    assert pool.take(Lane("more", 1, 1, 1)) is None
    for lane, gpus in ((one, first), (two, (0, 1)), (one, second)):
        pool.give_back(lane, gpus)
    assert pool.take(alone) == (0, 1) and pool.take(Lane("small", 1, 0.1, 1)) is None
    assert [pool.could_ever(Lane("", count, 4, 1)) for count in (ALONE, 1, 2, 3)] == [True, True, True, False]
    assert not pool.could_ever(Lane("", 1, 11, 1))


def test_all_lanes_fit_into_two_calls_on_four_gpus(request: pytest.FixtureRequest) -> None:
    """In parallel, if each takes as long as declared, within two calls of ten minutes."""
    waiting = lanes_of(item for item in request.session.items if Path(item.fspath).parent == HERE)
    tests = [test for lane in waiting for test in lane.tests]
    assert len(tests) == len(set(tests))
    pool, now = Pool([78.0] * 4), 0.0
    running: list[tuple[float, Lane, tuple[int, ...]]] = []
    while waiting or running:
        for lane in list(waiting):
            if (gpus := pool.take(lane)) is not None:
                waiting.remove(lane)
                running.append((now + lane.minutes, lane, gpus))
        assert running, f"no room, ever: {waiting}"
        now, ended, given = min(running, key=lambda each: each[0])
        running.remove((now, ended, given))
        pool.give_back(ended, given)
    assert now <= 20


def test_interrupted_lane_leaves_no_server() -> None:
    async def cut_off() -> tuple[int, bytes, list[psutil.Process]]:
        argv = [sys.executable, "-c", LANE_WITH_A_SERVER]
        lane = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        assert lane.stdout is not None and await lane.stdout.readline() == b"1\n"
        started = psutil.Process(lane.pid).children()
        assert len(started) == 1
        code = await end(lane)
        return code, await lane.stdout.readline(), started

    code, said, started = asyncio.run(cut_off())
    assert code == 124 and said == b"2\n", "it ends as by hand"
    assert psutil.wait_procs(started, timeout=60)[1] == []
