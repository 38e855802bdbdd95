"""Environment worker: runs the rollouts of one environment, `python -m primeslurm.orchestrator.worker`.

Nothing here needs to survive: a job that dies with its worker is dispatched anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import verifiers.v1 as vf
import zmq
import zmq.asyncio
from verifiers.v1.clients import ModelContext
from verifiers.v1.runtimes import subprocess as subprocess_runtime

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.generate import TokenClient, serving
from primeslurm.orchestrator.jobs import (
    STATUS_INTERVAL_S,
    Cancel,
    Job,
    Result,
    Status,
    ToWorker,
    encode_result,
)
from primeslurm.orchestrator.sequences import RolloutFailed, sequences, trainable_trace
from primeslurm.recipe import Recipe
from primeslurm.recipe.rollouts import Environment
from primeslurm.wire.addresses import AddressBook
from primeslurm.wire.rollouts import Rollout

log = logging.getLogger(__name__)


class Worker:
    """Runs jobs concurrently, as many as it is sent.

    Args:
        recipe: the run's recipe.
        environment: the one of its environments to serve.
        number: which of the environment's workers this is.
        address: the orchestrator's ZMQ address.
        addresses: where the routers are.
    """

    def __init__(
        self, recipe: Recipe, environment: Environment, number: int, address: str, addresses: AddressBook
    ) -> None:
        self._recipe = recipe
        self._environment = environment
        self._number = number
        self._addresses = addresses
        self._incarnation = uuid.uuid4().hex[:8]
        options = {"interception": {"type": "server"}, **dict(environment.args.get(environments.ENV_KEY, {}))}  # type: ignore[call-overload]
        self._env = environments.load(environment.id, {**environment.args, environments.ENV_KEY: options})
        self._tasks = environments.TaskStream(self._env.taskset, recipe.seed)
        self._clients: dict[str, TokenClient] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with serving(self._env) as clients:
            beat = asyncio.create_task(self._beat())
            try:
                while True:
                    self._handle(msgspec.msgpack.decode(await self._socket.recv(), type=ToWorker), clients)
            finally:
                beat.cancel()
                for task in self._jobs.values():
                    task.cancel()
                await asyncio.gather(*self._jobs.values(), return_exceptions=True)
                for client in self._clients.values():
                    await client.close()
                self._socket.close()

    def _handle(self, message: ToWorker, clients: dict[str, Any]) -> None:
        if isinstance(message, Cancel):
            for job in message.jobs:
                if task := self._jobs.pop(job, None):
                    task.cancel()
        elif message.id not in self._jobs:
            if message.router not in self._clients:
                client = TokenClient(
                    message.router,
                    functools.partial(self._addresses.url, message.router),
                    self._recipe.model.path,
                    self._recipe.max_len,
                    self._recipe.orchestrator.request_timeout_s,
                )
                self._clients[message.router] = clients[client.key] = client
            self._jobs[message.id] = asyncio.create_task(self._run(message))

    async def _beat(self) -> None:
        while True:
            status = Status(self._environment.label, self._number, self._incarnation, list(self._jobs))
            await self._socket.send(msgspec.msgpack.encode(status))
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _run(self, job: Job) -> None:
        try:
            frames = encode_result(job.id, await self._rollout(job))
        except Exception as error:  # an environment may raise anything; the rollout is then tried again
            if not isinstance(error, RolloutFailed):
                log.exception("job %s", job.id)
            frames = [msgspec.msgpack.encode(Result(job.id, error=f"{type(error).__name__}: {error}"))]
        # the job stays in the status until its result is queued: the result reaches the orchestrator before its absence
        await self._socket.send_multipart(frames)
        self._jobs.pop(job.id, None)

    async def _rollout(self, job: Job) -> tuple[Rollout, ...]:
        client = self._clients[job.router]
        started = time.monotonic()
        traces: list[str] = []
        context = ModelContext(model=self._recipe.model.path, client=client.config, sampling=self._sampling(job))
        try:
            episode = await self._env.run_episode(
                self._tasks[job.example], context, on_trace=lambda trace: traces.append(trace.id)
            )
        finally:
            completions = [completion for trace in traces for completion in client.endpoint.take(trace)]
        return sequences(job, trainable_trace(episode), completions, time.monotonic() - started)

    def _sampling(self, job: Job) -> vf.SamplingConfig:
        wanted = self._recipe.orchestrator.sampling.model_dump(exclude_none=True)
        return vf.SamplingConfig(**wanted, cache_salt=job.cache_salt)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="primeslurm.orchestrator.worker")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--environment", required=True, help="label of one of the recipe's environments")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--orchestrator", required=True, help="ZMQ address")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "aiohttp.access", "verifiers", "renderers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    recipe = Recipe.model_validate_json(options.recipe.read_bytes())
    environment = next(e for e in recipe.environments if e.label == options.environment)
    # verifiers keeps each rollout's working directory below the home directory: a killed worker would leave them there
    subprocess_runtime.CACHE_DIR = options.attempt_dir / "environments" / f"{environment.label}-{options.worker}"
    addresses = AddressBook(options.attempt_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Worker(recipe, environment, options.worker, options.orchestrator, addresses).run())


if __name__ == "__main__":
    main()
