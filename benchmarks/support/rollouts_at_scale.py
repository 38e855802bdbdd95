"""The processes of `python -m benchmarks rollouts_at_scale`: engines, environment workers, trainer, orchestrator.

All use the real protocols and sockets. Engines and trainer rank come from `primeslurm.testbed.emulated`. Many engines
share a process, each with its own port. The functions here are entry points of spawned processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from benchmarks.support.ports import HOST, free_port
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.orchestrator.worker.generate_endpoint import Completion
from primeslurm.recipe import Recipe
from primeslurm.testbed.emulated.rollout_script import Script
from primeslurm.wire.transport.addresses import AddressBook

TURNS = 100
# In tokens.
PROMPT, ANSWER, OBSERVED = 64, 8, 8
# Time between two requests of a rollout [s], half of it in the engine, half in tools.
TURN_S = 90.0
# Blocks of an engine's KV cache, enough not to limit the rollouts.
BLOCKS = 1 << 16
PROBE_S = 0.02


@dataclass(frozen=True)
class Place:
    """Paths and addresses of a run."""

    run_dir: Path
    wire: str
    env: str
    engines: int
    workers: int
    staggered: bool
    """Whether the first groups start between their first and last turn, as in the middle of a long run."""

    @property
    def recipe(self) -> Recipe:
        """Return the resolved recipe."""
        return Recipe.model_validate_json((self.run_dir / "recipe.resolved.json").read_bytes())


class Lag:
    """Lag of an event loop, by the clock and by the process's CPU time.

    `shared` holds the longest lag [us], the longest by CPU [us], the number of probes, and the number beyond each of
    `BOUNDS_MS`.
    """

    BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    @classmethod
    def room(cls) -> int:
        """Return the number of shared values."""
        return 3 + len(cls.BOUNDS_MS)

    async def watch(self) -> None:
        """Probe until cancelled."""
        while True:
            due, cpu = time.monotonic() + PROBE_S, time.thread_time()
            await asyncio.sleep(PROBE_S)
            late, busy = time.monotonic() - due, time.thread_time() - cpu
            shared = self._shared
            shared[0], shared[1] = max(shared[0], int(1e6 * late)), max(shared[1], int(1e6 * busy))
            shared[2] += 1
            for index, bound in enumerate(self.BOUNDS_MS):
                shared[3 + index] += 1e3 * late > bound


def engines(first: int, sockets: list[socket.socket]) -> None:
    """Serve engines, one per socket."""
    from primeslurm.testbed.emulated import engine, scheduler

    engine.MAX_RUNNING = 1 << 12
    scheduler.DECODE_TOKENS_PER_S = ANSWER / (TURN_S / 2)
    scheduler.SLOWDOWN_PER_REQUEST = 0.0
    asyncio.run(_engines(first, sockets))


async def _engines(first: int, sockets: list[socket.socket]) -> None:
    from primeslurm.inference.version_gate import VersionGate
    from primeslurm.testbed.emulated import engine, http_server

    served = []
    for index, listening in enumerate(sockets):
        emulated = engine.EmulatedEngine("m", 1 << 14, BLOCKS, first + index, tick_s=1.0)
        app = engine.Hangable(VersionGate(emulated))
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda app=app: http_server._Connection(app), sock=listening, backlog=1024)  # type: ignore[misc]
        served.append(asyncio.create_task(emulated.run()))
    await asyncio.gather(*served)


def worker(place: Place, number: int, turns: Synchronized[int], lag: Any) -> None:
    """Run rollouts as an environment worker does."""
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_worker(place, number, turns, lag))


async def _worker(place: Place, number: int, turns: Synchronized[int], lag: Any) -> None:
    from primeslurm.testbed.emulated.environment import Conversation, EmulatedEnvironment

    source = random.Random(number)

    class Agents(EmulatedEnvironment):
        """Rollouts of many short turns, with slow tools."""

        begun = 0

        async def _converse(self, job: Job, plan: Script) -> tuple[Conversation, str]:
            self.begun += 1
            talk, found = Conversation(), 0
            if place.staggered and self.begun <= place.recipe.max_inflight // place.workers:
                # shared by a group's rollouts, which end together
                turns_done = TURNS * random.Random(job.group).random()
                found = int(turns_done)
                await asyncio.sleep(TURN_S * (1 - turns_done % 1))
            talk.given([source.randrange(3, 1000) for _ in range(PROMPT)])
            for turn in range(TURNS):
                if turn < found:
                    tokens = [source.randrange(3, 1000) for _ in range(ANSWER)]
                    talk.sampled(Completion(tokens, [-1.0] * ANSWER, [job.opened_version] * ANSWER))
                else:
                    talk.sampled(await self._sample(job, talk.token_ids))
                    turns.value += 1
                    await asyncio.sleep(TURN_S / 2 * source.uniform(0.5, 1.5))
                talk.given([source.randrange(3, 1000) for _ in range(OBSERVED)])
            return talk, "stop"

    watching = asyncio.create_task(Lag(lag).watch())
    environment = Agents(place.recipe, AddressBook(place.run_dir / "attempts" / "1"))
    await JobRunner("agents", number, place.env, environment.rollout, node=str(number)).serve()
    watching.cancel()


def trainer(place: Place) -> None:
    """Train all batches at once, so that steps wait for rollouts."""
    from primeslurm.testbed.emulated import training_loop
    from primeslurm.testbed.emulated.rank_group import Ranks
    from primeslurm.wire.link.trainer_link import TrainerLink

    training_loop.TOKENS_PER_S_AND_RANK = 1e9
    link = TrainerLink(place.wire)
    training_loop.EmulatedTrainer(place.recipe, place.run_dir, 1, link, Ranks(HOST, free_port(), 0), 1).run()


def orchestrator(place: Place, routers: list[str], names: list[str], lag: Any) -> None:
    """Run the orchestrator."""
    from primeslurm.orchestrator.arguments import OrchestratorArguments

    logging.basicConfig(level=logging.WARNING, filename=place.run_dir / "orchestrator.log")
    arguments = OrchestratorArguments(place.run_dir, 1, "scale", place.wire, place.env, routers, names)
    asyncio.run(_orchestrator(place.recipe, arguments, lag))


async def _orchestrator(recipe: Recipe, arguments: Any, lag: Any) -> None:
    from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline

    watching = asyncio.create_task(Lag(lag).watch())
    await OrchestratorPipeline(recipe, arguments).run()
    watching.cancel()
