"""Rollouts of a real environment worker, against a fake engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker.main import Worker
from primeslurm.orchestrator.worker.token_client import TokenClient, serving
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport.addresses import AddressBook
from tests.support.fake_engine import FakeEngine

ROUTER = "router-0"


def small_recipe(model: Path | str, /, **changes: Any) -> Recipe:
    fields = {
        "name": "test",
        "max_steps": 5,
        "seq_len": 64,
        "model": {"path": str(model)},
        "environments": [{"id": "reverse-text"}],
        "orchestrator": {"batch_size": 8, "group_size": 4, "request_timeout_s": 60},
    }
    return Recipe.model_validate({**fields, **changes})


class OneAgent(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class TwoTurns(vf.Env[OneAgent]):  # type: ignore[misc]
    """Asks again after the first answer."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Reverse: again")


def with_words(env: type[vf.Env[Any]], config: type[vf.EnvConfig] = OneAgent) -> vf.Env[Any]:
    """Return an environment of a test, with the tasks of `reverse-text`."""
    environments.load("reverse-text", {})  # so that verifiers knows the name
    return env(config(taskset={"id": "reverse-text"}, interception={"type": "server"}))


def worker_of(recipe: Recipe) -> Worker:
    nowhere = Path("/nowhere")
    return Worker(recipe, recipe.environments[0], 0, "inproc://nobody", AddressBook(nowhere), nowhere)


@contextlib.asynccontextmanager
async def connected(
    worker: Worker, engine: FakeEngine, recipe: Recipe, *, routed: bool = False
) -> AsyncIterator[Worker]:
    """Connect a worker to the engine, as if a router were in front of it."""
    async with serving(worker._env) as clients:
        timeout_s = recipe.orchestrator.request_s
        where = (ROUTER, lambda: engine.url, recipe.model.path, recipe.max_len)
        client = TokenClient(*where, timeout_s, routed=routed)
        worker._clients[ROUTER] = clients[client.key] = client
        try:
            yield worker
        finally:
            await client.close()


def job_of(recipe: Recipe, task: int | None = None) -> Job:
    return Job("j", "g", recipe.environments[0].label, 0, 3, ROUTER, "run.1:3", task)


async def rollouts(
    engine: FakeEngine, recipe: Recipe, env: vf.Env[Any] | None = None, *, routed: bool = False
) -> tuple[Rollout, ...]:
    """Run one job, and return the sequences of its rollout. `env`: replaces the recipe's environment."""
    worker = worker_of(recipe)
    worker._env = env or worker._env
    async with connected(worker, engine, recipe, routed=routed):
        return await worker._rollout(job_of(recipe))
