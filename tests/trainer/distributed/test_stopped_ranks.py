"""The head names the one rank that hangs, with replicas, FSDP, context and expert parallelism.

Agents use real heartbeat pages and /proc. Their clock runs ten times as fast as the wall clock.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from primeslurm.node.agent.liveness_monitor import LivenessMonitor
from primeslurm.node.head.unresponsive_ranks import unresponsive_ranks
from primeslurm.plan.model import Process
from primeslurm.plan.supervision import HeartbeatLimits
from primeslurm.records.heartbeats import Heartbeat, HeartbeatPage
from tests.support.forks import Forked
from tests.trainer.conftest import make_recipe, start_ranks

LAYOUT = {"dp_replicate": 2, "cp": 2, "ep": 2}
RANKS = 8
LIMIT_S = 60
PATIENCE_S = 600.0
LOOK_S, FASTER = 0.1, 10.0


@dataclass
class Ranks:
    processes: Sequence[Forked | subprocess.Popen[str]]
    pages: Sequence[HeartbeatPage]
    agents: Sequence[LivenessMonitor]
    now: float = 0.0

    def heartbeats(self) -> list[Heartbeat]:
        """Last heartbeat of each rank."""
        return [page.read() for page in self.pages]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, and assert that all ranks are alive."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            dead = [process for process in self.processes if process.poll() is not None]
            assert not dead, dead[0].stdout.read() if dead[0].stdout else ""
            assert time.monotonic() < deadline, f"{what}: {self.heartbeats()}"
            time.sleep(0.02)

    def named(self) -> tuple[str, ...]:
        """Let the agents report, and return the rank that the head blames."""
        time.sleep(LOOK_S)
        self.now += LOOK_S * FASTER
        for agent in self.agents:
            agent.check(self.now)
        actual = unresponsive_ranks({str(rank): agent.of(str(rank)).report() for rank, agent in enumerate(self.agents)})
        return actual.behind if actual else ()

    def stop(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """Continue the rank, and wait until all ranks progress."""
        self.processes[rank].send_signal(signal.SIGCONT)

    def all_go_on(self) -> None:
        """Wait for a heartbeat of every rank."""
        before = self.heartbeats()
        self.until(lambda: all(b.number > a.number for a, b in zip(before, self.heartbeats(), strict=True)), "no beats")


@contextmanager
def training(source: Path, directory: Path, size: int, /, **sections: Any) -> Iterator[Ranks]:
    """Start ranks that train a model, and wait for their second step."""
    recipe = make_recipe(source, max_steps=10**6, checkpoint={"interval": 2, "keep": 1}, **sections)
    (directory / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    (directory / "run").mkdir()
    pages = [HeartbeatPage(f"rank-{rank}") for rank in range(size)]
    where = ",".join(f"/proc/{os.getpid()}/fd/{page.descriptor}" for page in pages)
    arguments = (str(directory / "recipe.json"), str(directory / "run"), where)
    processes = start_ranks(size, "tests.trainer.distributed.stopped_ranks", *arguments)
    agents = []
    for rank, (process, page) in enumerate(zip(processes, pages, strict=True)):
        agents.append(LivenessMonitor())
        heartbeats = HeartbeatLimits(hang_timeout_s=LIMIT_S)
        plan = Process(name=str(rank), role="trainer", node=0, argv=("python",), log="log", heartbeats=heartbeats)
        agents[-1].started(plan, process.pid, page, None)
    actual = Ranks(processes, pages, agents)
    try:
        actual.until(lambda: all((heartbeat.step or 0) >= 2 for heartbeat in actual.heartbeats()), "no second step")
        yield actual
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for page in pages:
            page.close()


@pytest.fixture(scope="module")
def ranks(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    trainer = {"optimizer": {"lr": 1e-5}, "parallelism": LAYOUT, "micro_batch_tokens": 64}
    with training(moe_model, tmp_path_factory.mktemp("stopped"), RANKS, trainer=trainer) as actual:
        yield actual


def is_named_to_the_end(ranks: Ranks, victim: int) -> None:
    """At first, others may still be on their way to the collective. After that, only the stopped rank is named."""
    ranks.until(lambda: ranks.named() == (str(victim),), f"rank {victim} is not named alone")
    assert [ranks.named() for _ in range(5)] == [(str(victim),)] * 5


def is_named_when_stopped_in(phase: str, ranks: Ranks, victim: int) -> None:
    ranks.until(lambda: ranks.pages[victim].read().phase == phase, f"no {phase}")
    ranks.stop(victim)
    is_named_to_the_end(ranks, victim)
    ranks.go_on(victim)
    ranks.all_go_on()


@pytest.mark.parametrize(
    "phase",
    [
        "forward_backward",
        pytest.param("optimizer", marks=pytest.mark.campaign),
        pytest.param("publish", marks=pytest.mark.campaign),
        "checkpoint",
    ],
)
def test_rank_that_hangs_in_a_phase_is_named(ranks: Ranks, phase: str) -> None:
    is_named_when_stopped_in(phase, ranks, random.Random(phase).randrange(RANKS))


def test_rank_that_hangs_in_a_collective_is_named(ranks: Ranks) -> None:
    """The rank waits for a late rank and hangs when that arrives: both have started equally many collectives."""
    late, victim = 2, 5
    ranks.until(lambda: ranks.pages[late].read().phase == "forward_backward", "no step")
    ranks.stop(late)
    is_named_to_the_end(ranks, late)
    assert ranks.pages[victim].read().collectives > ranks.pages[late].read().collectives
    ranks.stop(victim)
    ranks.go_on(late)
    is_named_to_the_end(ranks, victim)
    ranks.go_on(victim)
    ranks.all_go_on()
