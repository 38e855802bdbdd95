"""Cost of checking the run's secret in routers and in the ranks' store: requests and operations with and without.

Both routers run over the same server, which answers at once, and are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.support.ports import free_port
from benchmarks.support.servers import HOST, Server, start_process
from primeslurm.inference.auth import Receive, Scope, Send
from primeslurm.plan.commands.command import Command, ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.testbed.emulated import http_server
from primeslurm.wire.transport import rendezvous, secret

RESULT = Path(__file__).resolve().parent / "results" / "gates.json"
# Concurrent clients, requests per round, and tokens per prompt.
CLIENTS, REQUESTS, TOKENS = 8, 400, 2048
OPERATIONS = 500


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gates", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.server:
        asyncio.run(_serve(arguments.server))
    found = {
        "machine": f"{os.cpu_count()} CPU cores, Linux {platform.release()}",
        "router": _routers(arguments.rounds),
        "store": _stores(arguments.rounds),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


async def _serve(port: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await http_server.answer(send, 200, {"choices": []})

    async with await http_server.start(app, HOST, port) as server:
        await server.serve_forever()


def _routers(rounds: int) -> dict[str, Any]:
    """Return requests per second with `CLIENTS` clients, and the time of a request with one client [ms]."""
    recipe = Recipe.model_validate(
        {"name": "b", "max_steps": 1, "seq_len": 64, "model": {"path": "/m"}, "task": "serve"}
    )
    command = router_command(recipe, VllmRouter(), ReplicaEngines(["e"]), "router-0")
    start = command.argv.index("--health-port") + 2
    bare = Command(("${python}", "-m", "vllm_router.launch_router", *command.argv[start:]), command.env, command.ports)
    port = free_port()
    words = [sys.executable, "-m", "benchmarks", "gates", "--server", str(port)]
    engine = subprocess.Popen(words)
    with tempfile.TemporaryDirectory() as directory:
        place = {"addr:e:http": f"{HOST}:{port}"}
        routers: dict[str, Server] = {
            "bare": start_process(bare, place, Path(directory) / "bare.log"),
            "kept": start_process(command, place, Path(directory) / "kept.log"),
        }
        try:
            for router in routers.values():
                router.wait("/liveness")
            measured = _in_turns(
                rounds, {name: lambda it=it: asyncio.run(_load(it.url)) for name, it in routers.items()}
            )
        finally:
            engine.kill()
            for router in routers.values():
                router.kill()
    return measured


async def _load(url: str) -> dict[str, float]:
    body = {"token_ids": list(range(TOKENS)), "sampling_params": {"max_tokens": 1}}
    async with httpx.AsyncClient(headers=secret.header(), verify=False, timeout=60, trust_env=False) as client:

        async def one(requests: int) -> None:
            for _ in range(requests):
                (await client.post(f"{url}/inference/v1/generate", json=body)).raise_for_status()

        await one(20)
        began = time.perf_counter()
        await one(100)
        alone = (time.perf_counter() - began) / 100
        began = time.perf_counter()
        await asyncio.gather(*(one(REQUESTS // CLIENTS) for _ in range(CLIENTS)))
        return {"requests_per_s": REQUESTS / (time.perf_counter() - began), "ms": 1000 * alone}


def _stores(rounds: int) -> dict[str, Any]:
    """Return the time of an operation by a rank other than rank 0 [microseconds]."""
    import torch.distributed as dist

    from primeslurm.wire.transport.rendezvous_store import serve_store

    bare = dist.TCPStore(HOST, free_port(), is_master=True, wait_for_workers=False)
    kept = serve_store(HOST, port := free_port())
    clients = {
        "bare": dist.TCPStore(HOST, bare.port, is_master=False),
        "kept": dist.TCPStore(HOST, rendezvous.tunnel(HOST, port, 10), is_master=False),
    }

    def operate(client: dist.TCPStore) -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(OPERATIONS):
            client.check(["key"])
        return {"microseconds": 1e6 * (time.perf_counter() - began) / OPERATIONS}

    measured = _in_turns(rounds, {name: lambda it=it: operate(it) for name, it in clients.items()})
    del bare, kept
    return measured


def _in_turns(rounds: int, measures: dict[str, Callable[[], dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return {
        name: {what: round(median(row[what] for row in rows), 2) for what in rows[0]} for name, rows in found.items()
    }
