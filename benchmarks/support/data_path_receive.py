"""From environment workers to disk: load on the orchestrator's event loop, memory and CPU.

Two workers (`JobRunner`, separate processes) finish rollouts as fast as the orchestrator accepts them. The real
`Orchestrator` dispatches, receives, scores and spools their groups of 16, with fsync. Groups that would wait for the
trainer are checked and discarded. A rollout starts only if it fits into memory beside the buffered ones; otherwise ever
more of them would wait for a slow disk.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.loop_lag import waited_s
from benchmarks.support.ports import HOST, free_port
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.plan.commands.processes import HUGE_PAGES
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.batches.routed_experts import RoutedExperts

TOKENS, LAYERS, TOP_K, EXPERTS = 131_072, 75, 8, 256
WORKERS = 2
IN_FLIGHT = 16
# Rollouts that run, or wait for their group or the disk.
MOST_BUFFERED = 40
GROUP = 16
# Names of the orchestrator's node. With the second one, workers assume that it is another node.
HOSTS = {"from_the_same_node": HOST, "over_tcp": "localhost"}
TICK_S = 0.002
PAGE = resource.getpagesize()


def measure(rollouts: int) -> dict[str, Any]:
    """Send this many rollouts."""
    os.environ |= HUGE_PAGES  # as the orchestrator is started
    found = {name: in_process(receive, rollouts, host) for name, host in HOSTS.items()}
    return {"bytes_a_rollout": size_of(rollout(JOB, made(0))), **found}


def in_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call a function in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, *args))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    finally:
        process.join()
    return found


def _answer(pipe: Any, function: Callable[..., dict[str, Any]], *args: Any) -> None:
    pipe.send(function(*args))


def made(seed: int) -> RoutedExperts:
    """Return the routed experts of a rollout."""
    return np.random.default_rng(seed).integers(0, EXPERTS, (TOKENS, LAYERS, TOP_K), np.uint8)


def rollout(job: Job, experts: RoutedExperts) -> Rollout:
    """Return a finished rollout. Rewards differ."""
    mask = np.arange(TOKENS) >= 1000
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, float(job.number % 2))
    tokens = np.arange(TOKENS, dtype=np.int32)
    logprobs, versions = np.where(mask, np.float32(-0.5), np.float32(0)), np.where(mask, np.int32(0), np.int32(-1))
    return Rollout(info, tokens, mask, logprobs, versions, routed_experts=experts)


def size_of(found: Rollout) -> int:
    """Return the bytes sent for a rollout."""
    return sum(memoryview(frame).nbytes for frame in found.encode())


JOB = Job("j", "g", "e", 0, 0, "router-0", "salt")


def receive(rollouts: int, host: str) -> dict[str, Any]:
    """Run the whole way, in this process and its workers."""
    with tempfile.TemporaryDirectory(prefix="data_path-") as directory:
        return asyncio.run(_receive(Path(directory), max(2 * GROUP, rollouts), host))


class Looks:
    """Samples of the event loop's process, every TICK_S."""

    def __init__(self, buffered: Callable[[], int]) -> None:
        self.lags: list[float] = []
        self.own_lags: list[float] = []
        """Lags without waits for a CPU."""
        self.most_memory = self.most_buffered = 0
        self._buffered = buffered
        self._base = self._memory()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            began, waited = time.perf_counter(), waited_s()
            await asyncio.sleep(TICK_S)
            self.lags.append(time.perf_counter() - began - TICK_S)
            self.own_lags.append(max(0.0, self.lags[-1] - (waited_s() - waited)))
            self.most_memory = max(self.most_memory, self._memory() - self._base)
            self.most_buffered = max(self.most_buffered, self._buffered())

    def _memory(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


async def _receive(directory: Path, rollouts: int, host: str) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "schema": 1,
            "name": "data-path",
            "max_steps": 500,
            "seq_len": TOKENS,
            "model": {"path": "/models/none"},
            "environments": [{"id": "reverse-text"}],
            "orchestrator": {
                "batch_size": 2 * GROUP,
                "group_size": GROUP,
                "max_inflight_rollouts": IN_FLIGHT,
                "max_off_policy_steps": 8,
            },
            "deployment": {"train": {"nodes": 1}, "inference": {"type": "multi_node"}},
        }
    )
    bind, address = (f"tcp://{HOST}:{free_port()}" for _ in range(2))
    made_now = OrchestratorPipeline(recipe, OrchestratorArguments(directory, 1, "run", bind, address, ["router-0"], []))
    address = address.replace(HOST, host)
    label, context = recipe.environments[0].label, multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(label, n, address), daemon=True) for n in range(WORKERS)]
    for worker in workers:
        worker.start()
    expected = [made(number)[::4096] for number in range(WORKERS)]
    try:
        return await _through(made_now, rollouts, expected, directory)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


async def _through(
    orchestrator: OrchestratorPipeline, rollouts: int, expected: list[RoutedExperts], directory: Path
) -> dict[str, Any]:
    dispatch, pool = orchestrator.dispatcher, orchestrator.workers
    dispatch.version = 0
    payload = size_of(rollout(JOB, made(0)))

    def buffered() -> int:
        done = sum(len(group.done) for group in (*dispatch.open.values(), *dispatch.unsaved.values()))
        return payload * (done + sum(len(group.rollouts) for group in dispatch.ready))

    def has_room() -> bool:
        return buffered() + payload * (dispatch.inflight + 1) <= payload * MOST_BUFFERED

    looks = Looks(buffered)
    running = [asyncio.create_task(part) for part in (orchestrator.run_collect(), orchestrator.run_finalize())]
    seen, began, used = 0, 0.0, resource.getrusage(resource.RUSAGE_SELF)
    while seen < rollouts:
        for event in pool.expire():
            orchestrator.take_event(event)
        while has_room() and (job := dispatch.next_job(pool.available)):
            await pool.send(job)
        for group in dispatch.ready:
            check(group, expected, directory / "rollouts" / f"{group.id}.group")
            seen += GROUP
            if not began:  # processes have started, and caches are warm
                began, used, first = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), seen
                running.append(asyncio.create_task(looks.run()))
            deleting = asyncio.create_task(orchestrator.finalizer.delete([group.id]))
            del group
        dispatch.ready.remove(dispatch.ready)
        await asyncio.sleep(0.01)
        assert not any(part.done() for part in running)
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    for part in running:
        part.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await deleting  # before the directory is removed
    moved = (seen - first) * payload
    return {
        "rollouts": seen - first,
        "whole_way_gb_s": round(moved / seconds / 1e9, 2),
        "cpu_s_a_gb": round((now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / moved * 1e9, 2),
        "lag_ms": in_ms(looks.lags),
        "lag_but_for_waits_for_a_cpu_ms": in_ms(looks.own_lags),
        "most_buffered_gb": round(looks.most_buffered / 1e9, 2),
        "most_memory_gb": round(looks.most_memory / 1e9, 2),
        "most_memory_of_it": round(looks.most_memory / looks.most_buffered, 2),
    }


def check(group: RolloutGroup, expected: list[RoutedExperts], path: Path) -> None:
    """Check that the workers' rollouts are complete, and on disk."""
    for sequence in group.sequences:
        rows = sequence.routed_experts
        assert rows is not None and any(np.array_equal(rows[::4096], known) for known in expected)
    assert path.stat().st_size > sum(map(size_of, group.sequences))


def in_ms(lags: list[float]) -> dict[str, float]:
    """Return quantiles of lags [ms]."""
    lags = sorted(lags)
    return {name: round(1e3 * lags[int(share * (len(lags) - 1))], 1) for name, share in SHARES.items()}


SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def work(label: str, number: int, address: str) -> None:
    """Run one worker, whose rollouts finish at once."""
    experts = made(number)

    async def run(job: Job) -> tuple[Rollout, ...]:
        return (rollout(job, experts),)

    asyncio.run(JobRunner(label, number, address, run).serve())
