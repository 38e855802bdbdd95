"""Emulated engines behind the real vllm-router, for `benchmarks routing --emulated`."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.emulated_engines import EmulatedEngines
from benchmarks.support.servers import start_process
from benchmarks.support.simulated_engine import KV_TOKENS, SimulatedEngine
from primeslurm.orchestrator.rollouts.cache_salt import cache_salt
from primeslurm.orchestrator.worker.generate_endpoint import SESSION_HEADER, GenerateEndpoint
from primeslurm.plan.commands.command import ReplicaEngines
from primeslurm.plan.commands.routers import router_command
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter

RESULT = Path(__file__).resolve().parents[1] / "results" / "routing_emulated.json"
# By group: requests name their group as the session, and not their rollout. Without a session, kv_aware of vllm-router
# 0.1.17 takes the engine with the smallest (uncached + pending prompt tokens) x (requests + 1), and a prompt is pending
# until its whole answer arrives (policies/kv_aware.rs). So load often outweighs cached blocks.
CELLS = ("consistent_hash", "kv_aware", "consistent_hash by group", "kv_aware by group")


@dataclass(frozen=True)
class Load:
    """Rollouts of emulated engines. Lengths are log-normal, given as the median and the deviation of the logarithm."""

    name: str
    group: int
    """Rollouts of a group."""
    prompt: int
    """Tokens of a group's prompt."""
    slots: int
    """Rollouts in flight per engine."""
    answer: tuple[float, float]
    turns: tuple[float, int] = (0.0, 1)
    """Shape of a Pareto distribution of the number of turns, and their largest number."""
    observed: tuple[float, float] = (1.0, 0.0)
    """Tokens of a tool's answer."""
    tool_s: tuple[float, float] = (0.0, 0.0)
    kv_tokens: int = KV_TOKENS
    """KV cache of an engine."""
    slow: float = 1.0
    """Speed of one engine."""

    def script(self, name: str) -> list[tuple[int, int, float]]:
        """Return for each turn: new tokens of the prompt, sampled tokens, and the seconds of the tool before it."""
        draw = random.Random(name)

        def size(of: tuple[float, float]) -> float:
            return of[0] * math.exp(draw.gauss(0, of[1]))

        shape, most = self.turns
        turns = min(most, int(draw.paretovariate(shape) * 2)) if most > 1 else 1
        new = [int(size(self.observed)) + 1 if turn else 0 for turn in range(turns)]
        return [(tokens, int(size(self.answer)) + 1, size(self.tool_s) if tokens else 0.0) for tokens in new]


LONG_ANSWERS = Load("long answers", 8, 4096, 16, (1500, 0.8))
AGENTS = Load("agents", 8, 4096, 6, (150, 0.7), (1.2, 16), (400, 0.8), (4, 0.8))
# Loads of eight engines: groups begin within the time of a prefill; engines evict; one engine is slow.
HARDER = (
    replace(LONG_ANSWERS, name="short answers", answer=(200, 0.8)),
    replace(AGENTS, name="agents, tight cache", kv_tokens=2**15),
    replace(AGENTS, name="agents, slow engine", slow=0.5),
)
# Policies of emulated engines, without and with separate prefill engines. Prefill engines of kv_aware know no session.
POLICIES = {
    "plain": (*CELLS, "sticky_least_loaded by group"),
    "P/D": (*CELLS[:3], "consistent_hash by group, decode kv_aware"),
}
# Emulations that run at once
WORKERS = 2
# Rollouts per slot
REFILLS = 2


class Cell(NamedTuple):
    """Emulated engines with a load and a policy."""

    load: Load
    engines: int
    shape: str
    policy: str


def cells(sizes: Sequence[int]) -> list[Cell]:
    loads = [(load, size, shape) for load in (LONG_ANSWERS, AGENTS) for size in sizes for shape in POLICIES]
    loads += [(load, size, "plain") for load in HARDER for size in sizes if size == 8]
    return [Cell(*each, policy) for each in loads for policy in POLICIES[each[2]]]


def emulate_all(sizes: Sequence[int], seeds: int, write: bool) -> None:
    """Emulate all cells with several seeds, and write medians after each run. Rows of other sizes are kept."""
    runs: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells(sizes)}
    command = f"python -m benchmarks routing --emulated 4 8 32 --repeats {seeds} --write"
    with ProcessPoolExecutor(WORKERS) as pool:
        running = {pool.submit(emulate, cell, seed): cell for seed in range(seeds) for cell in runs}
        for done in as_completed(running):
            cell = running[done]
            runs[cell].append(done.result())
            print(cell.load.name, *cell[1:], json.dumps(runs[cell][-1]), flush=True)
            if write:
                rows = [
                    {**cell._asdict(), "load": cell.load.name, "seeds": len(of), **medians(of)}
                    for cell, of in runs.items()
                    if of
                ]
                if RESULT.exists():
                    rows += [row for row in json.loads(RESULT.read_bytes())["rows"] if row["engines"] not in sizes]
                rows.sort(key=lambda row: (row["load"], row["shape"], row["engines"], row["policy"]))
                loads = [vars(load) for load in (LONG_ANSWERS, AGENTS, *HARDER)]
                result = {"command": command, "machine": "2 CPU cores", "loads": loads, "rows": rows}
                RESULT.write_text(json.dumps(result, indent=2) + "\n")


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


def emulate(cell: Cell, seed: int) -> dict[str, float]:
    return asyncio.run(_emulate(cell, seed))


async def _emulate(cell: Cell, seed: int) -> dict[str, float]:
    """Serve a load with emulated engines, and return its report. With shape P/D, half of the engines prefill."""
    names = [f"e{number}" for number in range(cell.engines)]
    prefill = names[: len(names) // 2] if cell.shape == "P/D" else []
    workers = ReplicaEngines([], prefill, names[len(prefill) :]) if prefill else ReplicaEngines(names)
    speeds = dict.fromkeys(names, 1.0) | {names[0]: cell.load.slow}
    simulated = {name: SimulatedEngine(cell.load.kv_tokens, speed) for name, speed in speeds.items()}
    values = {"name": "routing", "max_steps": 1, "seq_len": 2**17, "model": {"path": "none"}}
    recipe = Recipe.model_validate(values | {"environments": [{"id": "reverse-text"}]})
    policy, _, decode_policy = cell.policy.replace(" by group", "").partition(", decode ")
    settings = VllmRouter.model_validate({"policy": policy, "decode_policy": decode_policy or None})
    kv_aware = policy == "kv_aware"
    engines = EmulatedEngines(simulated, prefill, kv_aware)
    await engines.start()
    with tempfile.TemporaryDirectory() as directory:
        command = router_command(recipe, settings, workers, "router-0")
        router = start_process(command, engines.addresses, Path(directory, "router.log"))
        try:
            await asyncio.to_thread(router.wait, "/health")
            await engines.subscribed()
            latencies = await serve_emulated(cell, engines, router.url, kv_aware, seed)
        finally:
            await asyncio.to_thread(router.stop)
            await engines.stop()
        if "kv_index" in (log := router.log.read_text()):
            raise RuntimeError(f"the router did not understand the KV events:\n{log[-1000:]}")
    first = [simulated[name].counts for name in prefill or names]
    hundredths, prompted = statistics.quantiles(latencies, n=100), [counts["prefix_queries"] for counts in first]
    return {
        "hit_rate": sum(counts["prefix_hits"] for counts in first) / sum(prompted),
        "p50_s": hundredths[49],
        "p95_s": hundredths[94],
        "p99_s": hundredths[98],
        "seconds": engines.time.now,
        "fullest_engine": max(prompted) / sum(prompted),
    }


async def serve_emulated(cell: Cell, engines: EmulatedEngines, url: str, kv_aware: bool, seed: int) -> list[float]:
    """Serve all rollouts of a load, and return the seconds of each turn."""
    load, by_group, slots = cell.load, " by group" in cell.policy, cell.load.slots * cell.engines
    time, latencies = engines.time, list[float]()
    endpoint = GenerateEndpoint(lambda: url, 2**20, 600, kv_aware=kv_aware)

    async def rollout(group: str, name: str) -> None:
        said, draw = list(random.Random(group).randbytes(load.prompt)), random.Random(name)
        for new, sampled, tool_s in load.script(name):
            if new:
                await time.sleep(tool_s)
            said += draw.randbytes(new)
            body = {"token_ids": said, "sampling_params": {"max_tokens": sampled}, "cache_salt": cache_salt("run.1", 0)}
            body |= {"rollout": name, "group": group, "shared": load.prompt}
            began = time.now
            said += (await endpoint.generate(body, {SESSION_HEADER: group if by_group else name})).token_ids
            latencies.append(time.now - began)

    async def slot(waiting: Iterator[tuple[str, str]]) -> None:
        for group, name in waiting:
            await rollout(group, name)
        time.move(-1)

    groups = [f"{load.name} {seed} {group}" for group in range(slots * REFILLS // load.group)]
    waiting = iter([(group, f"{group}-{number}") for group in groups for number in range(load.group)])
    running = list[asyncio.Task[None]]()
    for _ in range(slots):
        time.move(1)
        running.append(asyncio.create_task(slot(waiting)))
        await time.still()
    while not all(task.done() for task in running):
        await engines.tick()
    await asyncio.gather(*running)
    await endpoint.close()
    return latencies
