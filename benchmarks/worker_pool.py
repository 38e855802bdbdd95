"""Cost of many environment workers for the orchestrator: `python -m benchmarks worker_pool [--write]`.

Workers are real sockets of another process, and report their jobs every second, as real ones do. Measured in the
process of the pool: the time to send all rollouts, and the CPU share of the reports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path

import msgspec
import zmq

from primeslurm.orchestrator.dispatch.dispatcher import Dispatcher
from primeslurm.orchestrator.dispatch.limits import DispatchLimits
from primeslurm.orchestrator.rollouts.job_protocol import Job, Status, ToWorker
from primeslurm.orchestrator.rollouts.job_runner import STATUS_INTERVAL_S
from primeslurm.orchestrator.rollouts.worker_pool import WorkerEvent, WorkerPool
from primeslurm.wire.transport import curve

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "worker_pool.json"
# Nodes, workers, rollouts in flight.
SIZES = ((16, 64, 512), (16, 512, 512), (16, 512, 10_000), (64, 2_048, 10_000))
SECONDS = 10.0
GROUP = 16


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks worker_pool", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args(words).write
    rows = [measure(*size) for size in SIZES]
    result = {"command": "python -m benchmarks worker_pool --write", "cpus": os.cpu_count(), "sizes": rows}
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(nodes: int, workers: int, rollouts: int) -> dict[str, float]:
    """Measure one size, with the workers in a separate process."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    peers = multiprocessing.get_context("fork").Process(target=serve, args=(address, nodes, workers), daemon=True)
    peers.start()
    try:
        return asyncio.run(_pool(address, nodes, workers, rollouts))
    finally:
        peers.kill()
        peers.join()


def serve(address: str, nodes: int, workers: int) -> None:
    """Run all workers: each reports its jobs every second."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * workers)
    poller, running = zmq.Poller(), dict[zmq.Socket[bytes], list[Job]]()
    for _ in range(workers):
        socket = context.socket(zmq.DEALER)
        curve.secure_client(socket)
        socket.connect(address)
        poller.register(socket, zmq.POLLIN)
        running[socket] = []
    while True:
        began = time.monotonic()
        for number, (socket, jobs) in enumerate(running.items()):
            seen = max((job.number for job in jobs), default=0)
            status = Status("e", number, "1", [job.id for job in jobs], node=str(number % nodes), seen=seen)
            socket.send(msgspec.msgpack.encode(status))
        while (left := began + STATUS_INTERVAL_S - time.monotonic()) > 0:
            for socket, _ in poller.poll(1000 * left):
                message = msgspec.msgpack.decode(socket.recv(), type=ToWorker)
                if isinstance(message, Job):
                    running[socket].append(message)


async def _pool(address: str, nodes: int, workers: int, rollouts: int) -> dict[str, float]:
    lost: list[WorkerEvent] = []
    pool, heard = WorkerPool(address), 0

    async def receive() -> None:
        nonlocal heard
        while True:
            lost.extend(await pool.receive())
            heard += 1

    serving = asyncio.create_task(receive())
    while len(pool._live) < workers:
        await asyncio.sleep(0.1)
    limits = DispatchLimits({"e": GROUP}, rollouts // 2 // GROUP * GROUP, rollouts, 8, 500, {"e": 1.0})
    dispatch = Dispatcher(limits, ["r"], "x", "i")
    dispatch.version = 0
    began = time.process_time()
    while job := dispatch.next_job(pool.available):
        await pool.send(job)
    sending = time.process_time() - began
    await asyncio.sleep(2 * STATUS_INTERVAL_S)
    before, began = heard, time.process_time()
    for _ in range(int(5 * SECONDS)):
        lost += pool.expire()
        await asyncio.sleep(0.2)
    seconds, messages = time.process_time() - began, heard - before
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    pool.close()
    assert not lost, f"{len(lost)} jobs were lost"
    return {
        "nodes": nodes,
        "workers": workers,
        "rollouts": dispatch.inflight,
        "ms_a_job": round(1e3 * sending / dispatch.inflight, 3),
        "ms_a_status": round(1e3 * seconds / messages, 3),
        "share_of_a_core": round(seconds / messages * workers / STATUS_INTERVAL_S, 3),
    }
