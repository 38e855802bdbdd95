"""Throughput of an engine whose conversations outgrow its GPU, with and without KV offload to host memory.

    timeout 370 python -m benchmarks kv_offload OUT.json        # one GPU of 80 GB: two cells
    timeout 370 python -m benchmarks kv_offload OUT.json kept   # one GPU of 141 GB: the bound
    python -m benchmarks kv_offload OUT.json --shape tiny --layers 2 --prompt 512 --kv-gib 0.02 --host-gib 0.1   # CPUs

Needs neither network nor Slurm: the engine has Qwen3-30B-A3B's shape and random weights. Conversations of 8k tokens and
more take turns, so that all others are served before one returns. There are as many as host memory holds, so the GPU's
KV cache (8 GiB) has evicted each one by then. Cells: `offloaded`, with 32 GiB of host memory (in /dev/shm; less if it
is smaller); `dropped`, without; `kept`, a GPU cache for all of them. The first turn, which finds nothing cached, is
reported separately. A cell that exceeds its time says so, and the next one begins. OUT.CELL.log has the engine's
output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.machine import machine, versions
from benchmarks.support.servers import Server, start_engine
from primeslurm.orchestrator.telemetry import engine_load
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineDownError, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import GenerateEndpoint, NoAnswerError
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import ALONE, Engines
from primeslurm.plan.gpus import GIB
from primeslurm.recipe import Recipe

CELLS = ("offloaded", "dropped", "kept")
# Time limit of a cell [s]. On an H200 the engine starts in 80 s, and four turns take 50 s. Two cells fit into six
# minutes.
CELL_S = 175.0
# Share of host memory that all conversations fill at their longest, leaving room for those being written.
FILLED = 0.85
# Share of the GPU's cache that concurrently served conversations fill.
BUSY = 0.75
_TRANSFERRED = re.compile(r"^vllm:kv_offload_((?:load|store)_(?:bytes|time))_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """Load of an engine.

    Attributes:
        conversations: number of conversations.
        at_once: conversations served at a time.
        prompt: tokens of a conversation's first turn.
        added: tokens added at every later turn.
        sampled: tokens sampled at every turn.
        turns: turns per conversation.
    """

    conversations: int
    at_once: int
    prompt: int
    added: int
    sampled: int
    turns: int

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.prompt + (self.turns - 1) * self.added + self.turns * self.sampled


def load_for(prompt: int, sampled: int, turns: int, gpu_tokens: float, host_tokens: float) -> Load:
    """Return a load that fits into host memory and not into the GPU's cache.

    Args:
        sampled: tokens of a completion; 0 means 1/64 of the prompt.
        gpu_tokens: capacity of the GPU's KV cache [tokens].

    Raises:
        ValueError: host memory holds less than twice as much as the GPU, or the GPU less than one conversation.
    """
    one = Load(1, 1, prompt, prompt // 16, sampled or prompt // 64, turns)
    conversations, at_once = int(FILLED * host_tokens / one.longest), int(BUSY * gpu_tokens / one.longest)
    if at_once < 1:
        raise ValueError(f"the GPU's cache of {gpu_tokens:.0f} tokens is too small for {one.longest}: raise --kv-gib")
    if conversations * one.longest < 2 * gpu_tokens:
        raise ValueError(
            f"host memory for {host_tokens:.0f} tokens keeps {conversations} conversations of {one.longest}, and a GPU"
            f" with room for {gpu_tokens:.0f} forgets too few of them: raise --host-gib (and /dev/shm),"
            " or lower --kv-gib"
        )
    return Load(conversations, at_once, one.prompt, one.added, one.sampled, turns)


def token_bytes(config: Any, number_bytes: int) -> int:
    """Return the size of a token's keys and values [bytes]."""
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * number_bytes)


def recipe(model: Path, dtype: str, longest: int, kv_bytes: int, host_bytes: int | None) -> Recipe:
    """Return the recipe of one engine, with or without host memory behind its KV cache."""
    extra = {
        "load_format": "dummy",
        # Compilation would take most of a cell's time.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    inference = {
        "kv_cache_bytes": kv_bytes,
        "max_num_seqs": 32,  # and no CUDA graphs for more
        "kv_offload": {"type": "native", "cpu": {"bytes": host_bytes}} if host_bytes else None,
        "vllm_extra": extra,
    }
    sections = {
        "seq_len": longest,
        "model": {"path": str(model), "dtype": dtype},
        "environments": [{"id": "reverse-text"}],
    }
    return Recipe.model_validate({"name": "kv-offload", "max_steps": 1, "inference": inference, **sections})


async def counters(server: Server) -> dict[str, float]:
    """Return the engine's counters: tokens, and bytes and seconds of transfers."""
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        text = (await client.get(f"{server.url}/metrics", timeout=30)).text
    found = dict.fromkeys(engine_load.COUNTERS, 0.0) | engine_load.parse(text)
    for name in ("load_bytes", "load_time", "store_bytes", "store_time"):
        found[name] = sum(float(value) for kind, value in _TRANSFERRED.findall(text) if kind == name)
    return found


async def turn(server: Server, endpoint: GenerateEndpoint, said: Sequence[list[int]], load: Load) -> dict[str, Any]:
    """Continue all conversations by one turn, extend `said`, and return seconds and counter differences."""
    places, before, begun = asyncio.Semaphore(load.at_once), await counters(server), time.monotonic()

    async def go_on(tokens: list[int]) -> float:
        async with places:
            asked_at = time.monotonic()
            sampling = {"max_tokens": load.sampled, "temperature": 1.0, "ignore_eos": True}
            body = {"token_ids": tokens, "cache_salt": "0", "sampling_params": sampling}
            answer = await endpoint.generate(body, {})
        tokens += answer.token_ids
        return time.monotonic() - asked_at

    answers = await asyncio.gather(*map(go_on, said))
    seconds, after = time.monotonic() - begun, await counters(server)
    return {"seconds": seconds, "answers": answers, **{name: after[name] - before[name] for name in before}}


async def converse(
    server: Server, run_recipe: Recipe, load: Load, vocabulary: int, within_s: float, rows: list[dict[str, Any]]
) -> None:
    """Serve all turns of all conversations, and append the results of each turn to `rows`.

    Raises:
        TimeoutError: it took longer than `within_s`.
    """
    draw = random.Random(0)

    def words(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    client = EngineClient(lambda: server.url, run_recipe.model.path)
    endpoint = GenerateEndpoint(lambda: server.url, run_recipe.max_len, within_s)
    async with asyncio.timeout(within_s):
        # engines serve nobody before their first policy
        await client.apply(PolicyVersion(0, run_recipe.model.path), within_s)
        await turn(server, endpoint, [words(load.prompt)], load)  # compiles kernels
        said = [words(load.prompt) for _ in range(load.conversations)]
        for number in range(load.turns):
            for tokens in said if number else []:
                tokens += words(load.added)
            rows.append(await turn(server, endpoint, said, load))
            print(json.dumps(report(rows[-1:])), flush=True)
    await endpoint.close()
    await client.close()


def report(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise turns.

    Returns:
        Seconds, sampled tokens per second, seconds per completion; the shares of prompt tokens that were found in the
    GPU's cache and in host memory, and that were computed; GB and GB per second between the two.
    """
    total = {name: sum(row[name] for row in turns) for name in turns[0] if name != "answers"}
    answers = [seconds for row in turns for seconds in row["answers"]]
    prompted = max(1.0, total["prompted"])
    return {
        "seconds": round(total["seconds"], 2),
        "sampled_tokens_per_s": round(total["generated"] / total["seconds"], 1),
        "answer_seconds": {"median": round(statistics.median(answers), 3), "max": round(max(answers), 3)},
        "prompt_tokens": int(total["prompted"]),
        "shares": {
            "gpu": round(total["prefix_hits"] / prompted, 4),
            "host": round(total["external_hits"] / prompted, 4),
            "computed": round(total["computed"] / prompted, 4),
        },
        **{
            name: {
                "gb": round(total[f"{name}_bytes"] / 1e9, 2),
                "gb_per_s": round(total[f"{name}_bytes"] / 1e9 / (total[f"{name}_time"] or 1), 2),
            }
            for name in ("load", "store")
        },
        "preemptions": int(total["preemptions"]),
    }


def measure(
    run_recipe: Recipe, device: Device, load: Load, vocabulary: int, cell_s: float, log: Path
) -> dict[str, Any]:
    """Start an engine, serve the load, end it, and return the results or the reason for their absence."""
    begun = time.monotonic()
    log.unlink(missing_ok=True)
    server = start_engine(Engines(run_recipe, device, "engine", sys.executable).command(ALONE), log)
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    try:
        start_s = server.wait("/primeslurm/status", cell_s)
        found["start_seconds"] = round(start_s, 1)
        asyncio.run(converse(server, run_recipe, load, vocabulary, cell_s - start_s, rows))
    except (RuntimeError, TimeoutError, NoAnswerError, EngineDownError) as error:
        found["failed"] = f"{type(error).__name__} after {time.monotonic() - begun:.0f} s: {str(error)[-500:]}"
    finally:
        server.stop()
    parts = {"first_turn": rows[:1], "later_turns": rows[1:]}
    return found | {name: report(part) for name, part in parts.items() if part}


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv_offload", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; default: the first two")
    parser.add_argument("--shape", choices=["qwen3_30b_a3b", "qwen3_4b", "tiny"], default="qwen3_30b_a3b")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a conversation's first turn")
    parser.add_argument("--sampled", type=int, default=0, help="tokens of a completion; default: 1/64 of the prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=8.0, help="of the GPU's KV cache")
    parser.add_argument("--host-gib", type=float, default=32.0, help="of KV cache in host memory")
    parser.add_argument("--cell-s", type=float, default=CELL_S, help="seconds of a cell, its engine's start included")
    options = parser.parse_args(words)
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"no cell is named {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    return options


def main(words: list[str]) -> None:
    import torch

    from benchmarks.training_models import SHAPES

    options = arguments(words)
    on_gpu = torch.cuda.is_available()
    device: Device = "cuda" if on_gpu else "cpu"
    dtype, number_bytes = ("bfloat16", 2) if on_gpu else ("float32", 4)
    shape = SHAPES[options.shape]
    config = shape.build(options.layers, None, None)
    config.architectures = [shape.config.__name__.replace("Config", "ForCausalLM")]
    each = token_bytes(config, number_bytes)
    shm = shutil.disk_usage("/dev/shm").free
    kv_bytes, host_bytes = int(options.kv_gib * GIB), int(min(options.host_gib * GIB, 0.95 * shm))
    try:
        load = load_for(options.prompt, options.sampled, options.turns, kv_bytes / each, host_bytes / each)
    except ValueError as error:
        sys.exit(f"error: {error}")
    room = int(load.conversations * load.longest * each / FILLED)
    caches = {"offloaded": (kv_bytes, host_bytes), "dropped": (kv_bytes, None), "kept": (room, None)}
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks kv_offload", *words]),
        "machine": machine(),
        "versions": versions("torch", "vllm"),
        "kv_bytes_of_a_token": each,
        "gpu_tokens": kv_bytes // each,
        "host_gib": round(host_bytes / GIB, 2),
        "load": {**vars(load), "longest": load.longest},
        "cells": {},
    }
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        for cell in options.cells or CELLS[:2]:
            run_recipe = recipe(Path(name), dtype, load.longest, *caches[cell])
            log = options.out.with_suffix(f".{cell}.log")
            result["cells"][cell] = measure(run_recipe, device, load, config.vocab_size, options.cell_s, log)
            print(cell, json.dumps(result["cells"][cell]), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
