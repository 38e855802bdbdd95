"""Cost for the orchestrator of polling many engines: `python -m benchmarks engine_polls [--write]`.

Engines are emulated servers in other processes, each with its own port. Measured in the process of the weight update
loop: its CPU share while nothing happens, the longest time between two polls of an engine, and the time to confirm a
policy on all engines.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from primeslurm.inference.auth import Receive, Scope, Send
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.weight_updates.weight_update_loop import WeightUpdateLoop
from primeslurm.records.journal import Journal
from primeslurm.testbed.emulated import http_server
from primeslurm.wire.transport import secret

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "engine_polls.json"
SIZES = (64, 256, 1_000)
# Processes that serve the engines.
SERVERS = 4
SECONDS = 20.0


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine_polls", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args(words).write
    os.environ.setdefault(secret.VARIABLE, "of-nobody")
    rows = [measure(size) for size in SIZES]
    result = {"command": "python -m benchmarks engine_polls --write", "cpus": os.cpu_count(), "sizes": rows}
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(engines: int) -> dict[str, float]:
    """Measure this many engines, in a few processes."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(SERVERS)]
    shares = [engines // SERVERS + (i < engines % SERVERS) for i in range(SERVERS)]
    processes = [
        fork.Process(target=_serve, args=(pipe[1], share), daemon=True)
        for pipe, share in zip(pipes, shares, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        ports = [port for pipe in pipes for port in pipe[0].recv()]
        return asyncio.run(_look_after(ports, pipes[0][0]))
    finally:
        for process in processes:
            process.kill()
            process.join()


class _Engine:
    """Answers polls, and records their times."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.looks: list[float] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/primeslurm/status":
            self.looks.append(time.monotonic())
            state = {"version": self.version, "incarnation": "a", "paused": False, "updates": 0, "initialized": True}
            await http_server.answer(send, 200, state)
            return
        body = json.loads((await receive())["body"])
        self.version = int(body["new_version"])
        await http_server.answer(send, 200, {})


def _serve(pipe: Connection, count: int) -> None:
    asyncio.run(_serving(pipe, count))


async def _serving(pipe: Connection, count: int) -> None:
    engines = [_Engine() for _ in range(count)]
    servers = [await http_server.start(engine, "127.0.0.1", 0) for engine in engines]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: _tell(pipe, engines))
    await asyncio.Event().wait()


def _tell(pipe: Connection, engines: list[_Engine]) -> None:
    """Return the longest time between two polls of an engine since the previous call."""
    pipe.recv()
    gaps = [b - a for engine in engines for a, b in zip(engine.looks, engine.looks[1:], strict=False)]
    for engine in engines:
        engine.looks.clear()
    pipe.send(max(gaps, default=0.0))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def _look_after(ports: list[int], pipe: Connection) -> dict[str, float]:
    clients = {f"e{port}": EngineClient(functools.partial(_url, port), "/model") for port in ports}
    with tempfile.TemporaryDirectory() as directory:
        loop = WeightUpdateLoop(clients, Journal(Path(directory), "orchestrator"), timeout_s=300)
        task = asyncio.create_task(loop.run())
        await _all(loop, ports, "STALE")
        began, cpu = time.monotonic(), time.process_time()
        await loop.want(PolicyVersion(0, "/model"))
        await _all(loop, ports, "CURRENT")
        update_s, update_cpu_s = time.monotonic() - began, time.process_time() - cpu
        await asyncio.to_thread(_asked, pipe)
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(max(SECONDS, len(ports) / 25))
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        gap_s = await asyncio.to_thread(_asked, pipe)
        states = Counter(loop.pool.state(name) for name in clients)
        task.cancel()
        await asyncio.wait({task})
        kinds = Counter(
            json.loads(line)["kind"] for line in (Path(directory) / "events" / "orchestrator.jsonl").open("rb")
        )
    assert states == {"CURRENT": len(ports)}, states
    return {
        "engines": len(ports),
        "share_of_a_core": round(share, 3),
        "longest_between_looks_s": round(gap_s, 1),
        "all_confirmed_after_s": round(update_s, 2),
        "cpu_of_that_s": round(update_cpu_s, 2),
        "silent_engines": kinds["engine_silent"],
        "own_stalls": kinds["loop_stood_still"],
    }


def _asked(pipe: Connection) -> float:
    pipe.send(None)
    return float(pipe.recv())


async def _all(loop: WeightUpdateLoop, ports: list[int], state: str) -> None:
    while any(loop.pool.state(f"e{port}") != state for port in ports):
        await asyncio.sleep(0.02)
