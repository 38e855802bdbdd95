"""Decoding throughput with a model's experts spread over 2 and 4 GPUs, by all-to-all backend.

    timeout 590 python -m benchmarks wide_ep OUT.json 1 2-allgather_reducescatter 4-allgather_reducescatter
    timeout 590 python -m benchmarks wide_ep OUT.json 2-deepep_low_latency 4-deepep_low_latency
    timeout 590 python -m benchmarks wide_ep OUT.json 2-deepep_high_throughput 4-deepep_high_throughput
    python -m benchmarks wide_ep OUT.json 2-allgather_reducescatter --shape tiny --layers 2 --at-once 4 --cell-s 600

The last command is for CPUs. DeepEP cells need its kernels (`third_party/deepep/build.sh`). A cell is one data-parallel
group of engines with Qwen3-30B-A3B's shape, random weights and CUDA graphs of decode steps. Each engine serves the same
number of concurrent requests with short prompts. `1` is an engine that holds all experts. A cell that exceeds its time
says so, and the next one begins. OUT.CELL.RANK.log has the output of each engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.machine import machine, versions
from benchmarks.support.ports import HOST, free_port
from benchmarks.support.servers import Server, start_engine
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineDownError, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import GenerateEndpoint, NoAnswerError
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import ALONE, DataParallel, Engines
from primeslurm.recipe import Recipe

BACKENDS = ("allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput")
CELLS = ("1", *(f"{gpus}-{backend}" for backend in BACKENDS for gpus in (2, 4)))
# Tokens per request.
PROMPT, SAMPLED = 256, 256


@dataclass(frozen=True)
class Load:
    """Load of the engines.

    Attributes:
        at_once: concurrent requests per engine.
        vocabulary: size of the vocabulary of prompts.
        within_s: time limit [s].
    """

    at_once: int
    vocabulary: int
    within_s: float


def recipe(model: Path, dtype: str, cell: str, at_once: int) -> Recipe:
    """Return the recipe of a cell's engines."""
    _, _, backend = cell.partition("-")
    # The high-throughput kernels cannot be captured. vLLM disables graphs by itself only if it compiles.
    graphs = "NONE" if backend == "deepep_high_throughput" else "FULL_DECODE_ONLY"
    inference: dict[str, Any] = {
        "kv_cache_bytes": 2**33 if dtype == "bfloat16" else 2**26,
        "max_num_seqs": at_once,
        "vllm_extra": {
            "load_format": "dummy",
            # Compilation would take most of a cell's time.
            "compilation_config": {"mode": 0, "cudagraph_mode": graphs},
        },
    }
    if backend:
        inference |= {"expert_parallel": True, "all2all": backend}
    sections = {
        "seq_len": PROMPT + SAMPLED,
        "model": {"path": str(model), "dtype": dtype},
        "environments": [{"id": "reverse-text"}],
    }
    return Recipe.model_validate({"name": "wide-ep", "max_steps": 1, "inference": inference, **sections})


def start_group(run_recipe: Recipe, device: Device, size: int, stem: Path) -> list[Server]:
    """Start the engines of a group, each on its own GPU. They wait for one another, so do not wait for any here."""
    engines, port, servers = Engines(run_recipe, device, "engine", sys.executable), free_port(), []
    for rank in range(size):
        command = engines.command(DataParallel(size, rank, "rank-0") if size > 1 else ALONE)
        elsewhere = {"host:rank-0": HOST, "port:rank-0:dp_rpc": str(port)}
        log = stem.with_suffix(f"{stem.suffix}.{rank}.log")
        log.unlink(missing_ok=True)
        ports = {"dp_rpc": port} if rank == 0 and size > 1 else {}
        servers.append(start_engine(command, log, rank, elsewhere, ports))
    return servers


async def serve(servers: Sequence[Server], run_recipe: Recipe, load: Load) -> dict[str, Any]:
    """Sample with all engines at the same time. Raise TimeoutError."""
    async with asyncio.timeout(load.within_s):
        await asyncio.gather(*(open_up(server, run_recipe, load.within_s) for server in servers))
        await ask(servers, run_recipe, load, 8)  # compiles kernels
        return await ask(servers, run_recipe, load, SAMPLED)


async def open_up(server: Server, run_recipe: Recipe, within_s: float) -> None:
    """Tell an engine that its weights are version 0, before which it serves nobody."""
    client = EngineClient(lambda: server.url, run_recipe.model.path)
    await client.apply(PolicyVersion(0, run_recipe.model.path), within_s)
    await client.close()


async def ask(servers: Sequence[Server], run_recipe: Recipe, load: Load, sampled: int) -> dict[str, Any]:
    """Send all requests at the same time, and return the throughput."""
    draw = random.Random(sampled)

    def endpoint_of(server: Server) -> GenerateEndpoint:
        return GenerateEndpoint(lambda: server.url, run_recipe.max_len, load.within_s)

    async def one(endpoint: GenerateEndpoint) -> float:
        tokens = [draw.randrange(3, load.vocabulary) for _ in range(PROMPT)]
        sampling = {"max_tokens": sampled, "temperature": 1.0, "ignore_eos": True}
        begun = time.monotonic()
        await endpoint.generate({"token_ids": tokens, "cache_salt": "0", "sampling_params": sampling}, {})
        return time.monotonic() - begun

    endpoints = list(map(endpoint_of, servers))
    begun = time.monotonic()
    answers = await asyncio.gather(*(one(endpoint) for endpoint in endpoints for _ in range(load.at_once)))
    seconds = time.monotonic() - begun
    for endpoint in endpoints:
        await endpoint.close()
    rate = len(answers) * sampled / seconds
    return {
        "seconds": round(seconds, 2),
        "sampled_tokens_per_s": round(rate, 1),
        "of_each_engine": round(rate / len(servers), 1),
        "ms_per_token": round(1000 * statistics.median(answers) / sampled, 2),
    }


def measure(run_recipe: Recipe, device: Device, size: int, load: Load, stem: Path) -> dict[str, Any]:
    """Start a cell's engines, serve, end them, and return the results or the reason for their absence."""
    begun = time.monotonic()
    servers = start_group(run_recipe, device, size, stem)
    try:
        for server in servers:
            server.wait("/primeslurm/status", load.within_s)
        start_s = time.monotonic() - begun
        left = Load(load.at_once, load.vocabulary, load.within_s - start_s)
        return {"start_seconds": round(start_s, 1), **asyncio.run(serve(servers, run_recipe, left))}
    except (RuntimeError, TimeoutError, NoAnswerError, EngineDownError) as error:
        return {"failed": f"{type(error).__name__} after {time.monotonic() - begun:.0f} s: {str(error)[-500:]}"}
    finally:
        for server in servers:
            server.stop()


def main(words: list[str]) -> None:
    import torch

    from benchmarks.training_models import SHAPES

    parser = argparse.ArgumentParser(prog="python -m benchmarks wide_ep", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="+", metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--shape", choices=["qwen3_30b_a3b", "tiny"], default="qwen3_30b_a3b")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=64, help="requests of each engine")
    parser.add_argument("--cell-s", type=float, default=190.0, help="seconds of a cell, its engines' start included")
    options = parser.parse_args(words)
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"no cell is named {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    shape = SHAPES[options.shape]
    config = shape.build(options.layers, None, None)
    config.architectures = [shape.config.__name__.replace("Config", "ForCausalLM")]
    load = Load(options.at_once, config.vocab_size, options.cell_s)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks wide_ep", *words]),
        "machine": machine(),
        "versions": versions("torch", "vllm"),
        "tokens": {"prompt": PROMPT, "sampled": SAMPLED},
        "cells": {},
    }
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        for cell in options.cells:
            run_recipe = recipe(Path(name), dtype, cell, options.at_once)
            size = int(cell.partition("-")[0])
            result["cells"][cell] = measure(run_recipe, device, size, load, options.out.with_suffix(f".{cell}"))
            print(cell, json.dumps(result["cells"][cell]), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
