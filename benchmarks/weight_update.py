"""Seconds of a policy update by files and over NCCL, on CPUs (a minute).

One trainer rank and one real vLLM engine, with the demo's model. An update consists of `publish` (the trainer writes
files, or describes its tensors), `transfer` and `load` in the engine, and `pause`, the time without generation. Sent
tensors are loaded as they arrive, so transfer is part of load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.support.ports import free_port
from benchmarks.support.servers import Server, rank_environment, start_process
from benchmarks.support.timed_client import TimedClient
from primeslurm.orchestrator.weight_transfer.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_transfer.sessions import TransferSessions
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import SIGNAL, Interrupt
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.weight_transfer.collective_sender import Sender
from primeslurm.trainer.weight_transfer.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink
from scripts.models import tiny_model

RESULT = Path(__file__).resolve().parent / "results" / "weight_update.json"
UPDATES = 8


def recipe(model: Path, transport: str) -> Recipe:
    """Return the demo's recipe, as far as engines are concerned."""
    return Recipe.model_validate(
        {
            "name": "weight-update",
            "max_steps": 1,
            "seq_len": 256,
            "model": {"path": str(model), "dtype": "float32"},
            "environments": [{"id": "reverse-text"}],
            "inference": {"kv_cache_bytes": 32 * 2**20},
            "weights": {"transport": transport},
        }
    )


def start(run_recipe: Recipe, log: Path) -> Server:
    server = start_process(Engines(run_recipe, "cpu", "engine", sys.executable).command(ALONE), {}, log)
    server.wait("/primeslurm/status")
    return server


async def by_files(model: Path, directory: Path, world: World) -> list[dict[str, float]]:
    run_recipe = recipe(model, "filesystem")
    publisher = Publisher(build(run_recipe, world), directory, Encoding(torch.float32), 2, world)
    server = start(run_recipe, directory / "files.log")
    client = TimedClient(lambda: server.url, str(model))
    rows = []
    try:
        for version in range(1, UPDATES + 1):
            begun = time.monotonic()
            path = publisher.publish(version)
            published = time.monotonic() - begun
            await client.apply(PolicyVersion(version, str(path)), 60)
            rows.append({"publish": published, "transfer": 0.0, **client.split(), "total": time.monotonic() - begun})
    finally:
        server.stop()
    return rows


async def by_sending(model: Path, directory: Path, world: World) -> list[dict[str, float]]:
    run_recipe = recipe(model, "nccl")
    sessions, wanting = TransferSessions(workers=1, timeout_s=60), [0]

    async def handle(request: Request) -> Answer:
        return await sessions.answer(request, lambda: wanting[0], 4)  # type: ignore[arg-type]

    address = f"tcp://127.0.0.1:{free_port()}"
    serving = asyncio.create_task(OrchestratorLink(address, handle).serve())
    sender = Sender(build(run_recipe, world), Encoding(torch.float32), TrainerLink(address), world, 60)
    server = start(run_recipe, directory / "sent.log")
    client = TimedClient(lambda: server.url, str(model), sessions)
    rows = []
    try:
        for version in range(1, UPDATES + 1):
            wanting[0] = 1
            sessions.expect(version)
            begun = time.monotonic()
            sending = asyncio.create_task(asyncio.to_thread(sender.send, version))
            await client.apply(PolicyVersion(version, ""), 60)
            total, wanting[0] = time.monotonic() - begun, 0
            await sending
            rows.append({"publish": 0.0, "transfer": client.requests["/update_weights"][1], **client.split()})
            rows[-1]["total"] = total
    finally:
        server.stop()
        serving.cancel()
    return rows


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks weight_update", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    os.environ |= rank_environment(0, 1, free_port())
    world = join(Interrupt(), timeout_s=60)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny_model.write_model(directory / "model")
        found = {
            "filesystem": asyncio.run(by_files(directory / "model", directory, world)),
            "nccl": asyncio.run(by_sending(directory / "model", directory, world)),
        }
        size = sum(file.stat().st_size for file in (directory / "model").glob("*.safetensors"))
    world.close()
    seconds = {
        transport: {part: round(statistics.median(row[part] for row in rows[1:]), 3) for part in rows[0]}
        for transport, rows in found.items()
    }
    result = {
        "command": "python -m benchmarks weight_update --write",
        "machine": f"{os.cpu_count()} CPU cores, shared with other work; nccl is gloo between CPUs",
        "load_1m": round(load, 1),
        "megabytes": round(size / 1e6, 2),
        "updates": UPDATES - 1,
        "median_seconds": seconds,
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
