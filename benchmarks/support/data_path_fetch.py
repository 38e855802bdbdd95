"""From the orchestrator to the trainer ranks: a batch of 256 rows, fetched by 96 ranks, 8 of which share a row.

The orchestrator's part is real: packing and encoding in its thread, and its link on an event loop whose lag is
measured. Ranks are real links in two other processes. All rollouts have the same arrays, so that the 21 GB of the batch
are read but need not fit into memory, and ranks overwrite the previous routed experts.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.loop_lag import waited_s
from benchmarks.support.ports import free_port
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.pipeline.serve import HOLD_S
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import Batch, RankShard
from primeslurm.wire.batches.file_ranges import FrameSource
from primeslurm.wire.batches.frames import IncomingArrays
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.link.messages import Answer, GetBatch, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink

TOKENS, LAYERS, TOP_K = 131_072, 75, 8
DP, CP, GROUP = 12, 8, 16
PROCESSES = 2
LOOK_S = 0.005
# Repetitions of a single measurement; the best one had the least other load.
TIMES = 11
# Niceness of ranks, which in a run are on other nodes.
GIVE_WAY = 9


def measure(rollouts: int) -> dict[str, Any]:
    """Fetch a batch of this many rollouts, a multiple of 16."""
    return asyncio.run(_measure(rollouts))


def recipe_of(rollouts: int, transport: str = "zmq") -> Recipe:
    """Return a recipe with this many rollouts per batch."""
    return Recipe.model_validate(
        {
            "name": "data-path",
            "max_steps": 1,
            "seq_len": TOKENS,
            "model": {"path": "none"},
            "environments": [{"id": "reverse-text"}],
            "orchestrator": {"batch_size": rollouts, "group_size": GROUP, "rollout_transport": transport},
            "trainer": {"router_replay": True, "parallelism": {"cp": CP}},
        }
    )


def batch_of(recipe: Recipe) -> Batches:
    """Return the first step's batch, in GLM-5's shape."""
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(1, _groups(recipe.orchestrator.batch_size))
    return batches


async def _measure(rollouts: int) -> dict[str, Any]:
    recipe = recipe_of(rollouts)
    return await fetched(batch_of(recipe)) | _one_share(recipe, rollouts)


async def fetched(batches: Batches) -> dict[str, Any]:
    """Fetch the first step's batch with all ranks."""
    before, used = _resident_bytes(), [0]
    asked, encoded = dict[StepShard, float](), dict[StepShard, float]()
    requests = 0

    async def handle(request: Request) -> list[FrameSource] | Answer:
        nonlocal requests
        assert isinstance(request, GetBatch)
        share = StepShard(request.step, request.shard)
        requests += 1
        asked.setdefault(share, time.monotonic())
        frames = await batches.answer(share, HOLD_S)
        assert frames is not None
        if not isinstance(frames, Answer):
            encoded.setdefault(share, time.monotonic())
        return frames

    address = f"tcp://127.0.0.1:{free_port()}"
    link = OrchestratorLink(address, handle)
    late: list[float] = []
    own: list[float] = []
    background = [asyncio.create_task(link.serve()), asyncio.create_task(_watch(late, own, used))]
    begin = time.monotonic()
    found = await asyncio.gather(*(_ranks(address, number) for number in range(PROCESSES)))
    seconds = time.monotonic() - begin
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    held = max(used) - before
    whole = sum(sum(map(len, batches.get(StepShard(1, RankShard(rank, DP))) or [])) for rank in range(DP))
    figures = {
        "ranks": DP * CP,
        "batch_gb": round(whole / 1e9, 2),
        "bytes_out_per_batch_byte": round(link.sent_bytes / whole, 3),
        "bytes_in_per_batch_byte": round(sum(map(int, found)) / whole, 3),
        "requests_of_a_rank": round(requests / (DP * CP), 1),
        "seconds": round(seconds, 1),
        "gb_per_s": round(link.sent_bytes / seconds / 1e9, 2),
        "loop_lag_p99_ms": round(1e3 * float(np.percentile(late, 99)), 1),
        "loop_lag_max_ms": round(1e3 * max(late), 1),
        "loop_lag_but_for_waits_for_a_cpu_p99_ms": round(1e3 * float(np.percentile(own, 99)), 1),
        "loop_lag_but_for_waits_for_a_cpu_max_ms": round(1e3 * max(own), 1),
        "longest_wait_for_an_encoded_share_s": round(max(encoded[share] - asked[share] for share in asked), 2),
        "peak_memory_beside_rollouts_per_batch_byte": round(held / whole, 3),
    }
    batches.close()
    return figures


def _one_share(recipe: Recipe, rollouts: int) -> dict[str, Any]:
    """Encode and decode one rank's data in one thread, with its bytes already in memory.

    For comparison the same number of bytes is copied: into used memory, like pinned memory, and into new memory, which
    the kernel must find and clear first.
    """
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(1, _groups(rollouts))
    frames = batches.get(StepShard(1, RankShard(0, DP, 0, CP))) or []
    pieces = iter(range(1, CP))
    size = sum(map(len, frames))
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    room: dict[int, NDArray[np.uint8]] = {}

    def decode(empty: Callable[[int], NDArray[np.uint8]]) -> None:
        incoming = IncomingArrays(frames[0], empty, size)
        incoming.take(frames[1:])
        Batch.decode(incoming.frames())

    def copy_to_new() -> None:
        np.copyto(np.empty(size, np.uint8), source)

    parts: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "memcpy_into_new_memory": copy_to_new,
        "decode": lambda: decode(lambda size: room.setdefault(size, np.empty(size, np.uint8))),
        "decode_into_new_memory": lambda: decode(lambda size: np.empty(size, np.uint8)),
    }
    decode(lambda size: room.setdefault(size, np.ones(size, np.uint8)))
    seconds = {name: [_seconds(part) for _ in range(TIMES)] for name, part in parts.items()}
    seconds["encode"] = [
        _seconds(lambda: batches.get(StepShard(1, RankShard(0, DP, next(pieces), CP)))) for _ in range(CP - 1)
    ]
    batches.close()
    rates = {name: size / min(spent) / 1e9 for name, spent in seconds.items()}
    used, new = rates["memcpy"], rates["memcpy_into_new_memory"]
    return {
        "share_mb": round(size / 1e6, 1),
        "gb_per_s_alone": {name: round(rate, 2) for name, rate in rates.items()},
        "encode_share_of_memcpy": round(rates["encode"] / used, 2),
        "decode_share_of_memcpy": round(rates["decode"] / used, 2),
        "decode_into_new_memory_share_of_memcpy_into_new_memory": round(rates["decode_into_new_memory"] / new, 2),
        "decode_into_new_memory_share_of_memcpy": round(rates["decode_into_new_memory"] / used, 2),
    }


def _seconds(part: Callable[[], object]) -> float:
    begin = time.perf_counter()
    part()
    return time.perf_counter() - begin


def _groups(rollouts: int) -> list[RolloutGroup]:
    """Return rollouts that differ only in their rewards."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, TOKENS, np.int32)
    mask = np.arange(TOKENS) >= 1000
    logprobs = np.where(mask, -rng.random(TOKENS), 0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    routed = rng.integers(0, 255, (TOKENS, LAYERS, TOP_K), np.uint8)

    def rollout(number: int) -> tuple[Rollout, ...]:
        info = RolloutInfo(f"r{number}", f"g{number // GROUP}", "reverse-text", 0, float(number % 2))
        return (Rollout(info, tokens, mask, logprobs, versions, routed_experts=routed),)

    return [
        RolloutGroup(
            f"g{first // GROUP}", "reverse-text", first // GROUP, 0, tuple(map(rollout, range(first, first + GROUP)))
        )
        for first in range(0, rollouts, GROUP)
    ]


async def _watch(late: list[float], own: list[float], used: list[int]) -> None:
    """Record the event loop's lag, and the lag without waits for a CPU."""
    while True:
        used.append(_resident_bytes())
        begin, waited = time.monotonic(), waited_s()
        await asyncio.sleep(LOOK_S)
        late.append(time.monotonic() - begin - LOOK_S)
        own.append(max(0.0, late[-1] - (waited_s() - waited)))


async def _ranks(address: str, number: int) -> bytes:
    command = [sys.executable, "-m", __name__, address, str(number)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out


def _fetch_all(address: str, number: int) -> None:
    """Run the ranks of one process, and print how many bytes they received."""
    os.nice(GIVE_WAY)
    scratch: dict[int, NDArray[np.uint8]] = {}
    lock = threading.Lock()
    got: list[int] = []

    def empty(size: int) -> NDArray[np.uint8]:
        got.append(size)
        if size < 100 << 20:
            return np.empty(size, np.uint8)
        with lock:
            return scratch.setdefault(size, np.empty(size, np.uint8))

    def fetch(dp_rank: int, cp_rank: int) -> None:
        link = TrainerLink(address, empty=empty)
        batch = link.get_batch(1, RankShard(dp_rank, DP, cp_rank, CP), 600)
        assert batch is not None and all(row.routed_experts is not None for row in batch.rows)
        link.close()

    places = [(dp_rank, cp_rank) for dp_rank in range(DP) for cp_rank in range(CP)][number::PROCESSES]
    threads = [threading.Thread(target=fetch, args=place) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(got))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    _fetch_all(sys.argv[1], int(sys.argv[2]))
