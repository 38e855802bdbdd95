"""Work that grows with the data runs in threads, not on the event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq.asyncio

from primeslurm.orchestrator import teacher
from primeslurm.orchestrator.algorithms import Memory, from_recipe
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
from primeslurm.orchestrator.rollouts import worker_pool
from primeslurm.orchestrator.rollouts.flow_control import CHUNK_BYTES, to_chunks
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job, Status, encode_result
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import TakenOverError
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.link.messages import StepDone
from primeslurm.wire.transport import curve
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until_async
from tests.support.worker_pools import CallbackPool
from tests.unit.orchestrator.test_packing import group

RECIPE = Recipe.model_validate(recipe_data())
LABEL = RECIPE.environments[0].label


class FileWatcher:
    """A function that records the threads that call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.threads: set[threading.Thread] = set()

    def __call__(self, *args: Any) -> Any:
        self.threads.add(threading.current_thread())
        return self._function(*args)


def elsewhere(watched: FileWatcher) -> bool:
    """Tell whether a function was called, and only in threads."""
    return bool(watched.threads) and threading.current_thread() not in watched.threads


def long_rollout() -> Rollout:
    """Return a rollout whose arrays travel in chunks."""
    one, size = group([3], [1.0]).rollouts[0][0], 2 * CHUNK_BYTES
    return replace(
        one,
        token_ids=np.arange(size, dtype=np.int32),
        mask=np.ones(size, np.bool_),
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
    )


async def test_chunked_rollout_is_joined_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, object]] = []
    pool = CallbackPool(
        f"ipc://{tmp_path}/envs",
        lambda job, outcome: heard.append((job, outcome)),
        lambda job: heard.append((job, "lost")),
        lambda *unusable: pytest.fail(str(unusable)),
    )
    watched, held, joined = FileWatcher(worker_pool.join_frames), threading.Event(), worker_pool.join_frames
    watched._function = lambda parts: (held.wait(60), joined(parts))[1]
    serving = asyncio.create_task(pool.serve())
    worker = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    curve.secure_client(worker)
    worker.connect(f"ipc://{tmp_path}/envs")
    status = partial(Status, LABEL, 0, "1", node="n")
    await worker.send(msgspec.msgpack.encode(status([])))
    await wait_until_async(lambda: pool.available)
    await pool.send(Job("j", "g", LABEL, 0, 0, "router-0", "salt"))
    number = msgspec.msgpack.decode(await worker.recv(), type=Job).number
    monkeypatch.setattr(worker_pool, "join_frames", watched)
    await worker.send_multipart(to_chunks(encode_result("j", [long_rollout()])))
    await worker.send(msgspec.msgpack.encode(status([], seen=number)))  # the job has ended
    await wait_until_async(lambda: watched.threads)
    assert elsewhere(watched) and not heard, "the event loop is free"
    held.set()
    await wait_until_async(lambda: heard)
    ((job, outcome),) = heard
    assert job == "j" and isinstance(outcome, tuple) and len(outcome[0].token_ids) == 2 * CHUNK_BYTES
    serving.cancel()
    await asyncio.wait([serving])
    worker.close(linger=0)


async def test_batches_are_evicted_in_a_thread(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rollouts")
    watched = FileWatcher(spool.on_disk)
    batches = Batches(RECIPE, from_recipe(RECIPE), watched)
    for step in (1, 2, 3, 4):
        one = RolloutGroup(f"g-{step}", LABEL, step, 0, group([5, 9], [1.0, 0.0]).rollouts)
        spool.put(one)
        batches.add(step, [one])
        assert await batches.serve(StepShard(step, RankShard(0, 1)))
    batches.committed(2)
    assert await batches.serve(StepShard(3, RankShard(0, 1))), "the batch is on disk"
    assert await batches.serve(StepShard(2, RankShard(0, 1))) is None
    assert elsewhere(watched)
    batches.close()


async def test_teacher_answer_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [None, {"6": {"logprob": -0.5}}, {"7": {"logprob": -1.0}, "8": {"logprob": -0.1}}]

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": entries}]})

    watched = FileWatcher(teacher.decode_json)
    monkeypatch.setattr(teacher, "decode_json", watched)
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert (await teacher.Teacher(lambda: ["http://t/v1"], http).logprobs([5, 6, 7])).tolist() == [0.0, -0.5, -1.0]
    assert elsewhere(watched)


async def test_algorithm_remembers_a_batch_in_a_thread(tmp_path: Path) -> None:
    arguments = OrchestratorArguments(tmp_path, 1, "run", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", ["router-0"], [])
    server = OrchestratorPipeline(RECIPE, arguments)

    def remember(memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        return {"groups": float(len(groups))}

    watched = FileWatcher(remember)
    server.batch._algorithm = type("Counting", (), {"remember": watched})()
    size = RECIPE.group_size(RECIPE.environments[0])
    needed = RECIPE.orchestrator.batch_size // size
    for number in range(needed):
        rollouts = group([3] * size, [0.0] * size).rollouts
        assert server.dispatcher.add_ready(RolloutGroup(f"{LABEL}-{number:08d}", LABEL, number, 0, rollouts))
    assert await server.batch.form(early=False, deadline=math.inf)
    assert elsewhere(watched) and server.progress.now.memory == {2: {"groups": float(needed)}}


async def test_outdated_orchestrator_counts_no_step(tmp_path: Path) -> None:
    arguments = OrchestratorArguments(tmp_path, 1, "run", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", ["router-0"], [])
    server = OrchestratorPipeline(RECIPE, arguments)
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    with pytest.raises(TakenOverError, match="attempt 2 has taken over the run from attempt 1"):
        await server.service.handle(StepDone(1, {"loss": 0.5}))
    assert not (tmp_path / "metrics.jsonl").exists() and server.progress.now.done_step == 0
    with pytest.raises(TakenOverError):
        OrchestratorPipeline(RECIPE, arguments)
