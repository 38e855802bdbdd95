"""Ranks that wait in a collective report the missing rank, although their main threads are blocked."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from primeslurm.node.head.unresponsive_ranks import unresponsive_ranks
from primeslurm.records import heartbeats
from primeslurm.records.fleet import HeartbeatReport
from primeslurm.records.heartbeats import HeartbeatPage
from tests.support.forks import Forked
from tests.trainer.conftest import start_ranks

PATIENCE_S = 900.0


Ranks = list[tuple[Forked | subprocess.Popen[str], HeartbeatPage]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    pages = [HeartbeatPage(f"rank-{rank}") for rank in range(2)]
    paths = [f"/proc/{os.getpid()}/fd/{page.descriptor}" for page in pages]
    processes = start_ranks(2, "tests.trainer.distributed.waiting_ranks", *paths)
    yield list(zip(processes, pages, strict=True))
    for process in processes:
        process.kill()
        process.communicate()
    for page in pages:
        page.close()


def report(page: HeartbeatPage, silent_s: float) -> HeartbeatReport:
    heartbeat = page.read()
    return HeartbeatReport(heartbeat.phase, heartbeat.step, heartbeat.number, heartbeat.collectives, silent_s, 300.0)


def test_missing_rank_is_named(ranks: Ranks) -> None:
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
    assert waiting.stdout is not None
    stacks = ""
    while " in main" not in stacks:
        line = waiting.stdout.readline()
        assert line, stacks
        stacks += line
    assert " in sum" in stacks, stacks
