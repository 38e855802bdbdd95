"""Ranks that wait in a collective report the missing rank, although their main threads are blocked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.support.ports import free_port
from primeslurm.node.head.unresponsive_ranks import unresponsive_ranks
from primeslurm.records import heartbeats
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import HeartbeatPage

PATIENCE_S = 900.0


@pytest.fixture
def ranks() -> Iterator[list[tuple[subprocess.Popen[str], HeartbeatPage]]]:
    started, port = [], free_port()
    for rank in range(2):
        page = HeartbeatPage(f"rank-{rank}")
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in names.items()}, "CUDA_VISIBLE_DEVICES": ""}
        env[heartbeats.VARIABLE] = str(page.descriptor)
        argv = [sys.executable, "-m", "tests.trainer.distributed.waiting_ranks"]
        options = {"pass_fds": (page.descriptor,), "stderr": subprocess.PIPE, "text": True}
        started.append((subprocess.Popen(argv, env=env, **options), page))  # type: ignore[call-overload]
    yield started
    for process, page in started:
        process.kill()
        process.communicate()
        page.close()


def report(page: HeartbeatPage, silent_s: float) -> HeartbeatReport:
    heartbeat = page.read()
    return HeartbeatReport(heartbeat.phase, heartbeat.step, heartbeat.number, heartbeat.collectives, silent_s, 300.0)


def test_missing_rank_is_named(ranks: list[tuple[subprocess.Popen[str], HeartbeatPage]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    pages = [page for _, page in ranks]
    while not all(page.read().phase == "optimizer" for page in pages) or (
        pages[0].read().collectives != pages[1].read().collectives + 1
    ):  # ranks come there one after the other, and count after that
        assert time.monotonic() < deadline and all(process.poll() is None for process, _ in ranks)
        time.sleep(0.2)
    actual = unresponsive_ranks({f"trainer-rank-{rank}": report(page, 40.0 + rank) for rank, page in enumerate(pages)})
    assert actual is not None and actual.behind == ("trainer-rank-1",) and actual.heartbeat.phase == "optimizer"
    waiting = ranks[0][0]
    waiting.send_signal(heartbeats.DUMP_SIGNAL)  # it is in a collective, and yet tells where
    assert waiting.stderr is not None
    stacks = ""
    while " in main" not in stacks:
        line = waiting.stderr.readline()
        assert line, stacks
        stacks += line
    assert " in sum" in stacks, stacks
