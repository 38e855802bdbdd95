"""Router policies for rollouts: `python -m benchmarks routing [--emulated [N ...]] [--write]`.

Three real engines on CPUs with a tiny random model, and the real vllm-router. Rollouts of several turns come in groups
with a common prompt; all groups have the same beginning. A free slot is refilled at once. All cells serve the same
loads on the same engines in turns, each with a salt of its own. `ample` engines have room for all rollouts in flight at
their longest, and `tight` ones for a quarter. Measured are cached prompt tokens per prompt token, and the time of a
request. Other work on the machine changes that time, so three values stand beside it: the prompt tokens that a
request's engine computed for the requests in flight with it (`work`), those of the engine that computed most, and the
engines' CPU seconds.

With `--emulated`, the real router sends requests to simulated engines (`benchmarks.support.emulated_engines`), whose
loads make it matter where a prefix is cached.
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
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.kv_offload import token_bytes
from benchmarks.support.emulated_routing import CELLS, emulate_all, medians
from benchmarks.support.machine import machine, versions
from benchmarks.support.ports import HOST, free_port
from benchmarks.support.servers import Server, start_engine, start_process
from primeslurm.orchestrator.rollouts.cache_salt import cache_salt
from primeslurm.orchestrator.telemetry import engine_load
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.orchestrator.worker.generate_endpoint import SESSION_HEADER, GenerateEndpoint
from primeslurm.orchestrator.worker.router_session import RouterAnswer, RouterSession
from primeslurm.plan.commands.command import ReplicaEngines
from primeslurm.plan.commands.engine import Engines
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.wire.names import ENGINE_HEADER

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "routing.json"
ENGINES, GROUPS, ROLLOUTS, SLOTS = 3, 9, 4, 9
# Smallest and largest number of a rollout's turns, and of tokens sampled in a turn.
TURNS, SAMPLED = (1, 4), (4, 16)
# Tokens of the beginning of all prompts, of a group's prompt and of a tool's answer.
COMMON, PROMPT, ADDED = 128, 512, 96
LONGEST = COMMON + PROMPT + TURNS[1] * (ADDED + SAMPLED[1])
# KV cache of all engines, as a share of what the rollouts in flight need at their longest.
CACHES = {"ample": 2.0, "tight": 0.25}
# Values that are compared with those of the first cell for the same load.
RATIOS = ("p95_s", "seconds", "work_p95", "most_computed", "cpu_s")


class Served(NamedTuple):
    """A request that a real engine has answered, with its first and last second."""

    engine: str
    begun: float
    ended: float
    computed: int
    """Prompt tokens that were not cached."""


class Recorder(RouterSession):
    """A connection that keeps what it has sent."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.served: list[Served] = []

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> RouterAnswer:
        begun = time.monotonic()
        answer = await super().post(url, content, headers)
        if answer.status == httpx.codes.OK:
            usage = json.loads(answer.content)["usage"]
            computed = usage["prompt_tokens"] - (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            self.served.append(Served(answer.headers[ENGINE_HEADER], begun, time.monotonic(), computed))
        return answer


def main(words: list[str]) -> None:
    from benchmarks.training_models import SHAPES

    parser = argparse.ArgumentParser(prog="python -m benchmarks routing", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="loads of each policy; the medians are reported")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="of real engines")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument(
        "--emulated", nargs="*", type=int, metavar="N", help="emulate N engines, and write another file"
    )
    options = parser.parse_args(words)
    if options.emulated is not None:
        emulate_all(options.emulated or [4, 8, 32], options.repeats, options.write)
        return
    config = SHAPES["tiny"].build(2, None, None)
    config.architectures = [SHAPES["tiny"].config.__name__.replace("Config", "ForCausalLM")]
    load = {"groups": GROUPS, "rollouts_of_a_group": ROLLOUTS, "slots": SLOTS, "turns": TURNS, "sampled": SAMPLED}
    load |= {"engines": ENGINES, "common_tokens": COMMON, "prompt_tokens": PROMPT, "added_tokens": ADDED}
    command = f"python -m benchmarks routing --repeats {options.repeats} --caches {' '.join(options.caches)} --write"
    result: dict[str, Any] = {"command": command, "date": str(date.today()), "machine": machine()}
    result |= {"versions": versions("vllm", "vllm-router"), "load": load, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        for cache in options.caches:
            kv_bytes = int(CACHES[cache] * SLOTS * LONGEST * token_bytes(config, 4) / ENGINES)
            result["rows"] += measure(Path(name), cache, kv_bytes, config.vocab_size, options.repeats)
            if options.write:
                RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(model: Path, cache: str, kv_bytes: int, vocabulary: int, repeats: int) -> list[dict[str, Any]]:
    """Start engines, serve the loads of all cells in turns, and return a row of medians for each."""
    recipe = Recipe.model_validate(
        {
            "name": "routing",
            "max_steps": 1,
            "seq_len": LONGEST,
            "model": {"path": str(model), "dtype": "float32"},
            "environments": [{"id": "reverse-text"}],
            "inference": {
                "kv_cache_bytes": kv_bytes,
                "router": {"type": "vllm-router", "policy": "kv_aware"},
                "vllm_extra": {"load_format": "dummy", "enable_prompt_tokens_details": True},
            },
        }
    )
    command = Engines(recipe, "cpu", "engine", sys.executable).command()
    names = [f"e{number}" for number in range(ENGINES)]
    engines, addresses = list[Server](), dict[str, str]()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CELLS}
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name in names:
                ports = {port: free_port() for port in command.ports}
                addresses |= {f"addr:{name}:{port}": f"{HOST}:{number}" for port, number in ports.items()}
                engines.append(
                    start_engine(
                        command, Path(directory, f"{name}.log"), elsewhere={"host:router-0": HOST}, ports=ports
                    )
                )
            asyncio.run(load_policy(engines, model))
            for repeat in range(repeats):
                for cell in CELLS if repeat % 2 else reversed(CELLS):
                    settings = VllmRouter.model_validate({"policy": cell.partition(" ")[0]})
                    start = router_command(recipe, settings, ReplicaEngines(names), "router-0")
                    router = start_process(start, addresses, Path(directory, "router.log"))
                    try:
                        router.wait("/health")
                        run = asyncio.run(serve(router, engines, cell, vocabulary, repeat))
                    finally:
                        router.stop()
                    print(cache, cell, json.dumps(run), flush=True)
                    runs[cell].append(run)
        finally:
            for engine in engines:
                engine.stop()
    # Other work on the machine changes from load to load, but less so between the cells of one.
    base = runs[CELLS[0]]
    ratios = {
        cell: [
            {f"{name}_ratio": run[name] / first[name] for name in RATIOS} for run, first in zip(of, base, strict=True)
        ]
        for cell, of in runs.items()
    }
    return [
        {"cache": cache, "policy": cell, "loads": repeats, **medians(runs[cell]), **medians(ratios[cell])}
        for cell in CELLS
    ]


async def load_policy(engines: Sequence[Server], model: Path) -> None:
    for engine in engines:
        await asyncio.to_thread(engine.wait, "/primeslurm/status")
        client = EngineClient(lambda engine=engine: engine.url, str(model))  # type: ignore[misc]
        await client.apply(PolicyVersion(0, str(model)), 600)
        await client.close()


async def serve(router: Server, engines: Sequence[Server], cell: str, vocabulary: int, repeat: int) -> dict[str, float]:
    """Serve all rollouts through a router, and return what is reported of the load."""
    slots, latencies, salt = asyncio.Semaphore(SLOTS), list[float](), cache_salt(f"{cell}.{repeat}", 0)
    endpoint = GenerateEndpoint(lambda: router.url, LONGEST, 600, kv_aware="kv_aware" in cell)
    recorder = endpoint._http = Recorder(600)

    def tokens(draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    async def rollout(prompt: list[int], session: str) -> None:
        said, draw = list(prompt), random.Random(session)
        headers = {SESSION_HEADER: session.rpartition("-")[0] if "by group" in cell else session}
        async with slots:
            for _ in range(draw.randint(*TURNS)):
                sampled = draw.randint(*SAMPLED)
                sampling = {"max_tokens": sampled, "min_tokens": sampled, "temperature": 1.0}
                body = {"token_ids": said, "cache_salt": salt, "sampling_params": sampling}
                began = time.monotonic()
                answer = await endpoint.generate(body, headers)
                latencies.append(time.monotonic() - began)
                said += answer.token_ids + tokens(draw, ADDED)

    draw = random.Random(repeat)
    common, before, cpu_before = tokens(draw, COMMON), await counters(engines), cpu_seconds(engines)
    began = time.monotonic()
    prompts = [common + tokens(draw, PROMPT) for _ in range(GROUPS)]
    each = [(prompt, f"{repeat}-{group}-{n}") for group, prompt in enumerate(prompts) for n in range(ROLLOUTS)]
    await asyncio.gather(*(rollout(prompt, session) for prompt, session in each))
    seconds, cpu_s = time.monotonic() - began, cpu_seconds(engines) - cpu_before
    after = await counters(engines)
    await endpoint.close()
    spent = [{key: new[key] - old[key] for key in new} for new, old in zip(after, before, strict=True)]
    prompted = [engine["prompted"] for engine in spent]
    hundredths = statistics.quantiles(latencies, n=100)
    work = statistics.quantiles(map(partial(work_of, recorder.served), recorder.served), n=100)
    return {
        "hit_rate": sum(engine["prefix_hits"] for engine in spent) / sum(prompted),
        "p50_s": hundredths[49],
        "p95_s": hundredths[94],
        "seconds": seconds,
        "cpu_s": cpu_s,
        "work_p50": work[49],
        "work_p95": work[94],
        "computed": sum(engine["computed"] for engine in spent),
        "most_computed": max(engine["computed"] for engine in spent),
        "busier_engine": max(prompted) / sum(prompted),
    }


def cpu_seconds(engines: Sequence[Server]) -> float:
    """Return the CPU seconds of all processes of the engines until now."""
    roots = [psutil.Process(engine.pid) for engine in engines]
    processes = [process for root in roots for process in (root, *root.children(recursive=True))]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def work_of(served: Sequence[Served], one: Served) -> int:
    """Return the prompt tokens that a request's engine computed for it and for those in flight with it."""
    beside = (each for each in served if each.engine == one.engine)
    return sum(each.computed for each in beside if each.begun < one.ended and one.begun < each.ended)


async def counters(engines: Sequence[Server]) -> list[Mapping[str, float]]:
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        texts = [(await client.get(f"{engine.url}/metrics", timeout=60)).text for engine in engines]
    return [dict.fromkeys(engine_load.COUNTERS, 0.0) | engine_load.parse(text) for text in texts]
