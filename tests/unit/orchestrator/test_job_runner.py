"""The worker's end of the job protocol."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.rollouts import job_runner
from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Job,
    Result,
    RolloutError,
    encode_result,
    nearest,
    on_this_node,
)
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport import curve, secret
from tests.support.waiting import wait_until_async
from tests.support.worker_pools import CallbackPool
from tests.unit.orchestrator.test_packing import group


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens who asks for this process's secret."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        curve.secure_server(server)
        yield f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"


Rollouts = Callable[[Job], Awaitable[tuple[Rollout, ...]]]


@pytest.fixture
async def make_worker(address: str) -> AsyncIterator[Callable[[Rollouts], JobRunner]]:
    """A function that makes a worker of the server at `address`. The workers are closed before the server."""
    made = []

    def make(rollout: Rollouts) -> JobRunner:
        made.append(JobRunner("e", 0, address, rollout))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


async def rollout(job: Job) -> tuple[Rollout, ...]:
    raise AssertionError("nobody sends jobs")


async def test_worker_with_another_runs_secret_exits(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "own_secret", lambda: "that of another run")
    worker = JobRunner("e", 0, address, rollout)
    await asyncio.sleep(0.5)  # refused before it serves
    with pytest.raises(secret.SecretError, match=f"{address}: another run listens there"):
        await asyncio.wait_for(worker.serve(), 60)


class Panic(BaseException):
    """As a panic of a Rust library arrives in Python."""


class Unspeakable(Exception):
    """Its message cannot be made."""

    def __str__(self) -> str:
        return str(Unspeakable())


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.CancelledError(), "CancelledError: "),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (Panic("called `Option::unwrap()` on a `None` value"), "Panic: called"),
        (BaseExceptionGroup("several", [Panic("a"), ValueError("b")]), "BaseExceptionGroup: several"),
        (cancel_this_task, "CancelledError: "),
        (ValueError("the model said \ud83d"), "ValueError: the model said \\ud83d"),
        (RolloutError("\udcff" * 20_000), "RolloutError: \\udcff"),
        (Unspeakable(), "Unspeakable: it cannot be shown"),
    ],
    ids=["cancelled", "exit", "interrupt", "panic", "group", "cancels its task", "half a pair", "bytes", "unspeakable"],
)
async def test_any_exception_of_a_rollout_becomes_a_failure(
    error: Any, words: str, make_worker: Callable[[Rollouts], JobRunner]
) -> None:
    async def raising(job: Job) -> tuple[Rollout, ...]:
        if callable(error):
            error()
            await asyncio.sleep(60)
        raise error

    worker, said = make_worker(raising), list[Result]()

    async def say(message: Any) -> None:
        said.append(msgspec.msgpack.decode(message[0], type=Result))

    worker._send = say  # type: ignore[method-assign]
    worker.handle(Job("j", "g", "e", 0, 0, "router-0", "salt"))
    await asyncio.wait(list(worker._running.values()), timeout=600)
    assert not worker._running and not worker._jobs
    assert [each.job for each in said] == ["j"] and (said[0].error or "").startswith(words)


async def test_cancelled_job_has_no_result(make_worker: Callable[[Rollouts], JobRunner]) -> None:
    async def waiting(job: Job) -> tuple[Rollout, ...]:
        await asyncio.sleep(60)
        return ()

    worker, said = make_worker(waiting), list[Any]()

    async def say(message: Any) -> None:
        said.append(message)

    worker._send = say  # type: ignore[method-assign]
    worker.handle(Job("j", "g", "e", 0, 0, "router-0", "salt"))
    (task,) = worker._running.values()
    await asyncio.sleep(0)
    worker.handle(Cancel(["j"]))
    await asyncio.wait([task], timeout=60)
    assert task.cancelled() and not said and not worker._jobs


async def test_worker_serves_until_it_is_cancelled(address: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(JobRunner("e", 0, address, rollout).serve(), 0.5)


async def test_result_is_held_until_it_is_cancelled(
    make_worker: Callable[[Rollouts], JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group([3], [0.5]).rollouts[0]

    async def finished(job: Job) -> tuple[Rollout, ...]:
        if job.id == "bad":
            raise RolloutError("it is")
        return made

    size = sum(len(bytes(part)) for part in encode_result("j", made))
    monkeypatch.setattr(job_runner, "HELD_BYTES", 2 * size)
    monkeypatch.setattr(job_runner, "SMALL_RESULT", size - 1)
    worker = make_worker(finished)
    for name in ("a", "b", "c", "bad"):
        worker.handle(Job(name, "g", "e", 0, 0, "router-0", "salt"))
        await asyncio.wait(list(worker._running.values()), timeout=600)
    assert list(worker._unsent) == list(worker._jobs) == ["a", "b", "c"], "a failure is not kept"
    for name in ("a", "b", "c", "bad"):
        await worker._send_results([name])
    assert not worker._unsent
    assert list(worker._held) == list(worker._jobs) == ["b", "c"], "the oldest is given up"
    worker.handle(Cancel(["b"]))
    assert list(worker._held) == list(worker._jobs) == ["c"] and worker._held_bytes == job_runner.HELD_BYTES // 2
    worker.handle(Cancel(["c"]))
    assert not worker._held and worker._held_bytes == 0
    worker.handle(Job("unasked", "g", "e", 0, 0, "router-0", "salt"))
    await asyncio.wait(list(worker._running.values()), timeout=600)
    worker.handle(Cancel(["unasked"]))
    assert not worker._unsent and not worker._jobs and worker._held_bytes == 0
    monkeypatch.setattr(job_runner, "SMALL_RESULT", size)
    said: list[Any] = []

    async def say(message: Any) -> None:
        said.append(msgspec.msgpack.decode(message[0], type=Result))

    worker._send = say  # type: ignore[method-assign]
    worker.handle(Job("s", "g", "e", 0, 0, "router-0", "salt"))
    await asyncio.wait(list(worker._running.values()), timeout=600)
    assert [result.job for result in said] == list(worker._held) == list(worker._jobs) == ["s"]


async def test_results_that_end_together_share_a_message(make_worker: Callable[[Rollouts], JobRunner]) -> None:
    made = group([3], [0.5]).rollouts[0]
    end = asyncio.Event()

    async def finished(job: Job) -> tuple[Rollout, ...]:
        await end.wait()
        if job.id == "a":
            worker.handle(Cancel(["c"]))
        return made

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    worker = make_worker(finished)
    worker._send = send  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        worker.handle(Job(name, "g", "e", 0, 0, "router-0", "salt"))
    tasks = list(worker._running.values())
    end.set()
    await asyncio.wait(tasks, timeout=600)
    assert messages == [[*encode_result("a", made), *encode_result("b", made)]], "all but the cancelled one"
    assert list(worker._held) == list(worker._jobs) == ["a", "b"]


async def test_closed_worker_does_not_block_other_sockets() -> None:
    """The server ends the connection of the closed worker, whose handshake has not ended."""
    context = zmq.asyncio.Context.instance()
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = JobRunner("e", 0, f"tcp://127.0.0.1:{server.getsockname()[1]}", rollout)
        connection, _ = await asyncio.to_thread(server.accept)
        worker.close()
        connection.close()
    await asyncio.sleep(0.2)  # ZMQ notices it
    with context.socket(zmq.PUSH) as sending, context.socket(zmq.PULL) as receiving:
        sending.linger = 0
        sending.connect(f"tcp://127.0.0.1:{receiving.bind_to_random_port('tcp://127.0.0.1')}")
        await asyncio.wait_for(sending.send(b"x"), 600)
        assert await asyncio.wait_for(receiving.recv(), 600) == b"x"


async def test_worker_on_the_same_node_uses_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results: asyncio.Queue[tuple[str, tuple[Rollout, ...] | str]] = asyncio.Queue()
    bind, (sent,) = f"tcp://127.0.0.1:{free_port()}", group([100_000], [1.0]).sequences

    async def done(job: Job) -> tuple[Rollout, ...]:
        return (sent,)

    assert nearest(bind) == bind, "nobody is there yet"
    pool = CallbackPool(bind, lambda *result: results.put_nowait(result), lambda job: None, lambda *unusable: None)
    assert nearest(bind.replace("127.0.0.1", "localhost")).startswith("tcp://localhost"), "perhaps another node"
    worker = JobRunner("e", 0, bind, done)
    assert worker._socket.getsockopt(zmq.LAST_ENDPOINT).startswith(b"ipc://")
    tasks = [asyncio.create_task(part) for part in (pool.serve(), worker.serve())]
    await wait_until_async(lambda: pool.available)
    await pool.send(Job("j", "g", "e", 0, 0, "router-0", "salt"))
    job, outcome = await asyncio.wait_for(results.get(), 60)
    assert job == "j" and not isinstance(outcome, str)
    assert np.array_equal(outcome[0].token_ids, sent.token_ids) and not outcome[0].token_ids.flags.owndata
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_socket_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address = "tcp://10.0.0.1:5000"
    path = on_this_node(address)
    assert path is not None and on_this_node("ipc://elsewhere") is None and nearest(address) == address
    path.touch()
    assert nearest(address) == address, "no socket"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert nearest(address) == f"ipc://{path}"
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        assert nearest(address) == address, "another user's"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    assert on_this_node(address) is None
