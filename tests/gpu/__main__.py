"""Runs all tests of this directory in parallel on this machine's GPUs.

    timeout 600 python -m tests.gpu OUT --limit-s 570
    timeout 600 python -m tests.gpu OUT --limit-s 570 --again

Most of their time is compilation, on one core each. OUT gets a log of each lane and `lanes.json`. With `--again`, lanes
that have passed according to it are skipped. The exit code is 0 if all lanes have passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.gpu.lanes import Lane, Pool, lanes_of

HERE = Path(__file__).parent
OUTCOMES = "lanes.json"
STARTS_BEFORE_END_S = 90
"""Lanes that begin later cannot finish in time."""
ENDING_S = 20
"""Time for a lane to end its engines when it is cut off [s]."""
HEADROOM_GB = 3
"""Memory of each GPU for CUDA contexts, which lanes do not count."""


class Outcome(msgspec.Struct):
    """Result of a lane."""

    passed: bool
    seconds: int
    said: str
    """Its last line of output."""


class Collector:
    """A pytest plugin that keeps the collected tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collected() -> list[pytest.Item]:
    """Collect the tests of this directory without running any."""
    collector = Collector()
    pytest.main([str(HERE), "--collect-only", "-qq"], plugins=[collector])
    faulthandler.cancel_dump_traceback_later()  # set by conftest for a process that should end with pytest
    return collector.items


def visible() -> dict[str, float]:
    """Return the memory [GB] of each usable GPU, by its name in CUDA_VISIBLE_DEVICES."""
    argv = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if mine := os.environ.get("CUDA_VISIBLE_DEVICES"):
        argv.append(f"--id={mine}")
    sizes = [int(line) * 2**20 / 1e9 for line in subprocess.check_output(argv, text=True).split()]
    return dict(zip(mine.split(",") if mine else map(str, range(len(sizes))), sizes, strict=True))


class Runner:
    """Runs lanes within a time limit.

    Args:
        pool: the GPUs, by index in `names`.
        limit_s: time limit of all lanes together [s].
        outcomes: results by lane name, written to the directory after each lane.
    """

    def __init__(self, out: Path, names: list[str], pool: Pool, limit_s: float, outcomes: dict[str, Outcome]) -> None:
        self._out, self._names, self._pool, self._outcomes = out, names, pool, outcomes
        self._began, self._limit_s = time.monotonic(), limit_s
        self._ended = asyncio.Event()

    @property
    def left_s(self) -> float:
        """Return the remaining time [s]."""
        return self._limit_s - (time.monotonic() - self._began)

    async def run(self, lanes: list[Lane]) -> None:
        """Run the lanes for which there are GPUs and time."""
        waiting, running = list(lanes), set[asyncio.Task[None]]()
        while waiting or running:
            if self.left_s < STARTS_BEFORE_END_S:
                waiting = []
            for lane in list(waiting):
                if (gpus := self._pool.take(lane)) is not None:
                    waiting.remove(lane)
                    running.add(asyncio.create_task(self._one(lane, gpus)))
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 5)
            running = {task for task in running if not task.done()}

    async def _one(self, lane: Lane, gpus: tuple[int, ...]) -> None:
        began, log = time.monotonic(), self._out / f"{lane.name}.log"
        argv = [sys.executable, "-m", "pytest", "-q", "-s", "--durations=8", "-p", "no:cacheprovider", *lane.tests]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(self._names[gpu] for gpu in gpus)}
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=HERE.parents[1], env=env, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = await asyncio.wait_for(process.wait(), max(1, self.left_s - ENDING_S))
            except TimeoutError:
                code = await end(process)
        self._pool.give_back(lane, gpus)
        lines = log.read_text(errors="replace").strip().splitlines()
        said = lines[-1][:200] if lines else ""
        outcome = self._outcomes[lane.name] = Outcome(code == 0, round(time.monotonic() - began), said)
        (self._out / OUTCOMES).write_bytes(msgspec.json.format(msgspec.json.encode(self._outcomes), indent=1))
        print(f"{time.monotonic() - self._began:5.0f} {lane.name} on {gpus}: {outcome.seconds} s, {said}", flush=True)
        self._ended.set()


async def end(process: asyncio.subprocess.Process) -> int:
    """End a lane with SIGINT, so that fixtures end their servers, then kill the rest of its session and its servers.

    Engines have their own sessions, and would keep their GPUs' memory.
    """
    started = _started_by(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), ENDING_S / 2)
    for each in started + _started_by(process.pid):
        with contextlib.suppress(psutil.Error):
            each.kill()  # if it is still the same process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    return 124


def _started_by(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def main() -> int:
    """Run the lanes. Return 0 if all have passed, and 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, default=1800, help="what has not ended by then is cut off")
    parser.add_argument("--again", action="store_true", help="only what has not passed according to OUT")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / OUTCOMES
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, Outcome]) if options.again else {}
    gpus = visible()
    pool = Pool([each - HEADROOM_GB for each in gpus.values()])
    lanes = [lane for lane in lanes_of(collected()) if lane.name not in known or not known[lane.name].passed]
    runner = Runner(options.out, list(gpus), pool, options.limit_s, known)
    asyncio.run(runner.run([lane for lane in lanes if pool.could_ever(lane)]))
    bad = [lane for lane in lanes if lane.name not in known or not known[lane.name].passed]
    for lane in bad:
        why = known[lane.name].said if lane.name in known else "no GPUs, or no time, for it"
        print(f"not passed: {lane.name} ({lane.gpus or 'all'} GPUs, {lane.memory_gb:.0f} GB): {why}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
