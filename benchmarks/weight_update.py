"""Seconds of a policy update by files and over NCCL, on CPUs (a minute).

One trainer rank and one real vLLM engine, with the demo's model. An update consists of `publish` (the trainer writes
files, or describes its tensors), `transfer` and `load` in the engine, and `pause`, the time without generation. Sent
tensors are loaded as they arrive, so transfer is part of load.

With `--deltas MODEL`, compare whole versions and deltas (`weights.deltas`) after real AdamW steps on a model in
bfloat16, such as SmolLM2-135M, on text of docs/ (ten minutes). All deltas have version 1 as their base. `cpu` are CPU
seconds of `publish`, which other work on the machine changes less.

With `--beside MODEL`, compare what training waits for if versions are written before the next step and beside it (half
a minute): CPU seconds of the training thread, and of the other thread.
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
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from benchmarks.support.ports import free_port
from benchmarks.support.servers import Server, rank_environment, start_process
from benchmarks.support.timed_client import TimedClient
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import SIGNAL, Interrupt
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.weight_senders.collective_sender import Sender
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink
from scripts.models import tiny_model

RESULT = Path(__file__).resolve().parent / "results" / "weight_update.json"
DELTAS_RESULT = RESULT.with_name("weight_deltas.json")
UPDATES = 8
# Learning rates, training steps and batch of the benchmark of deltas
LEARNING_RATES = (1e-6, 1e-5)
STEPS = 2
ROWS, SEQ_LEN = 1, 256


def recipe(model: Path, transport: str, dtype: str = "float32") -> Recipe:
    """Return the demo's recipe, as far as engines are concerned."""
    return Recipe.model_validate(
        {
            "name": "weight-update",
            "max_steps": 1,
            "seq_len": SEQ_LEN,
            "model": {"path": str(model), "dtype": dtype},
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


async def with_deltas(model: Path, directory: Path, world: World) -> list[dict[str, Any]]:
    """Train and publish every version both whole and as a delta. Then load all of them into one engine."""
    run_recipe = recipe(model, "filesystem", "bfloat16")
    text = "\n".join(path.read_text() for path in sorted(Path("docs/how-to").glob("*.md")))
    batches = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[0][: STEPS * ROWS * SEQ_LEN]
    batches = batches.view(STEPS, ROWS, SEQ_LEN)
    rows: list[dict[str, Any]] = []
    for rate in LEARNING_RATES:
        policy = build(run_recipe, world)
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=rate)
        encoding, run = Encoding(torch.bfloat16), directory / str(rate)
        publishers = {
            "whole": Publisher(policy, run / "whole", encoding, STEPS + 1, world),
            "delta": Publisher(policy, run / "delta", encoding, STEPS + 1, world, whole=lambda version: version == 1),
        }
        for publisher in publishers.values():
            publisher.publish(1)
        for step in range(1, STEPS + 1):
            logits = policy.logits(batches[step - 1], torch.arange(SEQ_LEN).expand(ROWS, -1))[0]
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batches[step - 1][:, 1:].flatten()
            ).backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for form, publisher in publishers.items():
                begun, cpu = time.monotonic(), time.process_time()
                path = publisher.publish(step + 1)
                seconds = {"publish": time.monotonic() - begun, "cpu": time.process_time() - cpu}
                row = {"learning_rate": rate, "step": step, "form": form, "path": str(path), **seconds}
                rows.append(row | {"bytes": publisher.size, "changed": changed_elements(path)})
                print(rows[-1], flush=True)
    server = start(run_recipe, directory / "deltas.log")
    client = TimedClient(lambda: server.url, str(model))
    try:
        for row in sorted(rows, key=lambda row: str(row["form"])):
            await client.apply(PolicyVersion(row["step"] + 1, row.pop("path")), 600)
            row |= client.split()
    finally:
        server.stop()
    return rows


def beside(model: Path, directory: Path, world: World) -> dict[str, dict[str, float]]:
    """Publish versions before and beside the next step, in turn. Return median CPU seconds by part."""
    publisher = Publisher(
        build(recipe(model, "filesystem", "bfloat16"), world), directory, Encoding(torch.bfloat16), 1, world
    )
    publisher.publish(1)
    publisher.begin(2, world)()  # allocates the copy
    rows: dict[str, list[float]] = {"before": [], "copy": [], "write": []}
    for version in range(3, 3 + 2 * UPDATES, 2):
        start = time.thread_time()
        publisher.publish(version)
        published = time.thread_time()
        write = publisher.begin(version + 1, world)
        copied = time.thread_time()
        write()
        parts = zip(rows, (published - start, copied - published, time.thread_time() - copied), strict=True)
        for part, seconds in parts:
            rows[part].append(seconds)
    return {"median_cpu_seconds": {part: round(statistics.median(values), 3) for part, values in rows.items()}}


def changed_elements(directory: Path) -> int:
    """Return the number of elements that a delta stores with their index. 0 for a whole version."""
    count = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            slices = [handle.get_slice(key) for key in handle.keys() if key.endswith("indices")]  # noqa: SIM118
            count += sum(each.get_shape()[0] for each in slices)
    return count


def summary_of_deltas(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per learning rate and step, with bytes and seconds of the whole version and of the delta."""
    summary: dict[tuple[float, int], dict[str, Any]] = {}
    for row in rows:
        at = {"learning_rate": row["learning_rate"], "steps_since_base": row["step"]}
        entry = summary.setdefault((row["learning_rate"], row["step"]), at)
        parts = {part: round(row[part], 3) for part in ("publish", "cpu", "load", "pause")}
        entry[row["form"]] = {"megabytes": round(row["bytes"] / 1e6, 2), **parts}
        if row["form"] == "delta":
            entry["changed_elements"] = row["changed"]
    return list(summary.values())


async def measured(options: argparse.Namespace, directory: Path, world: World) -> dict[str, Any]:
    if options.beside is not None:
        return beside(options.beside, directory, world)
    if options.deltas is not None:
        return {"updates": summary_of_deltas(await with_deltas(options.deltas, directory, world))}
    model = directory / "model"
    tiny_model.write_model(model)
    transports = {
        "filesystem": await by_files(model, directory, world),
        "nccl": await by_sending(model, directory, world),
    }
    seconds = {
        transport: {part: round(statistics.median(row[part] for row in rows[1:]), 3) for part in rows[0]}
        for transport, rows in transports.items()
    }
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return {"megabytes": round(size / 1e6, 2), "updates": UPDATES - 1, "median_seconds": seconds}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks weight_update", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}, or {DELTAS_RESULT.name}")
    parser.add_argument("--deltas", type=Path, metavar="MODEL", help="compare whole versions and deltas of this model")
    parser.add_argument("--beside", type=Path, metavar="MODEL", help="compare writes before and beside the next step")
    options = parser.parse_args(words)
    if options.write and options.beside:
        parser.error("argument --beside: its result is not recorded. Leave out --write.")
    os.environ |= rank_environment(0, 1, free_port())
    world = join(Interrupt(), timeout_s=60)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    load = os.getloadavg()[0]
    flags = "--beside MODEL" if options.beside else f"{'--deltas MODEL ' if options.deltas else ''}--write"
    with tempfile.TemporaryDirectory() as name:
        values = asyncio.run(measured(options, Path(name), world))
    world.close()
    result = {
        "command": f"python -m benchmarks weight_update {flags}",
        "machine": f"{os.cpu_count()} CPU cores, shared with other work; nccl is gloo between CPUs",
        "load_1m": round(load, 1),
        **values,
    }
    print(json.dumps(result, indent=2))
    if options.write:
        path = DELTAS_RESULT if options.deltas else RESULT
        path.write_text(json.dumps(result, indent=2) + "\n")
