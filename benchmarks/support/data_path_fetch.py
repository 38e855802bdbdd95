"""From the orchestrator to the ranks of a trainer: one batch of 256 rows, fetched by 96 ranks, 8 of which share a row.

The orchestrator's part is real: packing and encoding in its thread, its link on an event loop that also says how late
it is. Ranks are real links in two other processes. All rollouts have the same arrays, so that the 21 GB of the batch
are read but need not be held, and ranks put routed experts where the last ones were; nothing else is different.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.ports import free_port
from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches, Share
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.link import Answer, GetBatch, OrchestratorLink, Request, TrainerLink
from primeslurm.wire.rollouts import Batch, Frame, Incoming, Rollout, RolloutInfo

TOKENS, LAYERS, TOP_K = 131_072, 75, 8
DP, CP, GROUP = 12, 8, 16
PROCESSES = 2
LOOK_S = 0.005


def measure(rollouts: int) -> dict[str, Any]:
    """Fetch a batch of so many rollouts, a multiple of 16."""
    memcpy = memcpy_gb_per_s()
    return asyncio.run(_measure(rollouts, memcpy))


async def _measure(rollouts: int, memcpy: float) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "name": "data-path",
            "max_steps": 1,
            "seq_len": TOKENS,
            "model": {"path": "none"},
            "environments": [{"id": "reverse-text"}],
            "orchestrator": {"batch_size": rollouts, "group_size": GROUP},
            "trainer": {"router_replay": True, "parallelism": {"cp": CP}},
        }
    )
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(1, _groups(rollouts))
    before, used = _resident_bytes(), [0]
    waits: list[float] = []

    async def handle(request: Request) -> list[Frame] | Answer:
        assert isinstance(request, GetBatch)
        share = Share(request.step, request.dp_rank, request.dp_world, request.cp_rank, request.cp_world)
        begin = time.monotonic()
        frames = batches.encoded(share) or await batches.serve(share)
        assert frames is not None
        waits.append(time.monotonic() - begin)
        return frames

    address = f"tcp://127.0.0.1:{free_port()}"
    link = OrchestratorLink(address, handle)
    late: list[float] = []
    background = [asyncio.create_task(link.serve()), asyncio.create_task(_watch(late, used))]
    begin = time.monotonic()
    found = await asyncio.gather(*(_ranks(address, number) for number in range(PROCESSES)))
    seconds = time.monotonic() - begin
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    held = max(used) - before
    whole = sum(sum(map(len, batches.get(Share(1, rank, DP)) or [])) for rank in range(DP))
    figures = {
        "ranks": DP * CP,
        "batch_gb": round(whole / 1e9, 2),
        "bytes_out_per_batch_byte": round(link.sent_bytes / whole, 3),
        "bytes_in_per_batch_byte": round(sum(map(int, found)) / whole, 3),
        "requests_of_a_rank": round(len(waits) / (DP * CP), 1),
        "seconds": round(seconds, 1),
        "gb_per_s": round(link.sent_bytes / seconds / 1e9, 2),
        "memcpy_gb_per_s": round(memcpy, 2),
        "loop_lag_p99_ms": round(1e3 * float(np.percentile(late, 99)), 1),
        "loop_lag_max_ms": round(1e3 * max(late), 1),
        "longest_wait_for_an_encoded_share_s": round(max(waits), 2),
        "peak_memory_beside_rollouts_per_batch_byte": round(held / whole, 3),
    }
    batches.close()
    return figures | _one_share(recipe, rollouts, memcpy)


def _one_share(recipe: Recipe, rollouts: int, memcpy: float) -> dict[str, Any]:
    """Encode and decode alone, in one thread: what a rank gets, with its bytes already here."""
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(1, _groups(rollouts))
    batches.get(Share(1, 0, DP, 0, CP))
    begin = time.monotonic()
    frames = batches.get(Share(1, 0, DP, 1, CP)) or []
    encode_s = time.monotonic() - begin
    size = sum(map(len, frames))
    rates: dict[str, float] = {}
    room: dict[int, NDArray[np.uint8]] = {}
    for kind in ("new", "used", "used"):  # what is pinned is used again
        begin = time.monotonic()
        incoming = Incoming(frames[0], lambda size: room.setdefault(size, np.empty(size, np.uint8)), size)
        incoming.take(frames[1:])
        Batch.decode(incoming.frames())
        rates[kind] = size / (time.monotonic() - begin) / 1e9
    batches.close()
    return {
        "share_mb": round(size / 1e6, 1),
        "encode_share_of_memcpy": round(size / encode_s / 1e9 / memcpy, 2),
        "decode_share_of_memcpy": round(rates["used"] / memcpy, 2),
        "decode_into_new_memory_share_of_memcpy": round(rates["new"] / memcpy, 2),
    }


def _groups(rollouts: int) -> list[RolloutGroup]:
    """Of rollouts that differ in nothing but their rewards."""
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


async def _watch(late: list[float], used: list[int]) -> None:
    while True:
        used.append(_resident_bytes())
        begin = time.monotonic()
        await asyncio.sleep(LOOK_S)
        late.append(time.monotonic() - begin - LOOK_S)


async def _ranks(address: str, number: int) -> bytes:
    command = [sys.executable, "-m", __name__, address, str(number)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out


def _fetch_all(address: str, number: int) -> None:
    """The ranks of one process; prints how many bytes they got."""
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
        batch = link.get_batch(1, dp_rank, DP, 600, cp_rank=cp_rank, cp_world=CP)
        assert batch is not None and all(row.routed_experts is not None for row in batch.rows)
        link.close()

    places = [(dp_rank, cp_rank) for dp_rank in range(DP) for cp_rank in range(CP)][number::PROCESSES]
    threads = [threading.Thread(target=fetch, args=place) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(got))


def memcpy_gb_per_s() -> float:
    """How fast this machine copies what is not in its caches, in one thread."""
    source, target = (np.ones(512 << 20, np.uint8) for _ in range(2))
    best = 0.0
    for _ in range(3):
        begin = time.monotonic()
        np.copyto(target, source)
        best = max(best, len(source) / (time.monotonic() - begin) / 1e9)
    return best


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    _fetch_all(sys.argv[1], int(sys.argv[2]))
