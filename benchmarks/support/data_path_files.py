"""From the orchestrator to the trainer ranks by files: as `data_path_fetch`, but nothing is sent.

The orchestrator's part is real: packing, encoding, writing with a flush in its threads, and its link on an event loop
whose lag is measured. Ranks are real links in two other processes, which read the files. The kernel counts the bytes of
each process. For comparison, a plain loop writes and reads one file.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.data_path_fetch import CP, DP, GIVE_WAY, PROCESSES, _watch, batch_of, recipe_of
from benchmarks.support.ports import free_port
from primeslurm.orchestrator.batching.batches import StepShard
from primeslurm.orchestrator.batching.shard_files import ShardFiles
from primeslurm.wire.batches import batch_files
from primeslurm.wire.batches.batch import RankShard
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.link.messages import LARGEST_BATCH, Answer, GetBatch, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.link.trainer_link import TrainerLink

HOLD_S = 4.0
# Size from which ranks overwrite an array with the next one [bytes], because this machine's memory is limited.
LARGE = 20 << 20
# Ranks of a process that read at a time, for the same reason.
AT_ONCE = 4
TIMES = 11


def measure(rollouts: int) -> dict[str, Any]:
    """Transfer a batch of this many rollouts, a multiple of 16."""
    return asyncio.run(_measure(rollouts))


async def _measure(rollouts: int) -> dict[str, Any]:
    batches = batch_of(recipe_of(rollouts, "filesystem"))
    whole = sum(sum(map(len, batches.get(StepShard(1, RankShard(rank, DP))) or [])) for rank in range(DP))
    with tempfile.TemporaryDirectory(prefix="primeslurm-") as directory:
        files = ShardFiles(Path(directory), 1, batches, 0)

        async def handle(request: Request) -> list[Frame] | Answer:
            assert isinstance(request, GetBatch)
            share = StepShard(request.step, request.shard)
            answer = await files.answer(share, unreadable=request.unreadable, within_s=HOLD_S)
            assert answer is not None
            return answer

        address = f"tcp://127.0.0.1:{free_port()}"
        link = OrchestratorLink(address, handle)
        late: list[float] = []
        own: list[float] = []
        used: list[int] = []
        background = [asyncio.create_task(link.serve()), asyncio.create_task(_watch(late, own, used))]
        await asyncio.sleep(0.1)
        before, counted, spent, begin = used[-1], _counted(), time.process_time(), time.monotonic()
        found = [json.loads(out) for out in await asyncio.gather(*(_ranks(address, n) for n in range(PROCESSES)))]
        seconds, spent = time.monotonic() - begin, time.process_time() - spent
        written = _counted()["wchar"] - counted["wchar"]  # including the messages of other processes
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        one = next(iter(sorted(Path(directory).glob("batches/1/step_000001/*"))))
        alone = _alone(one, Path(directory))
        files.close()
    batches.close()
    return {
        "ranks": DP * CP,
        "rollouts": rollouts,
        "batch_gb": round(whole / 1e9, 2),
        "written_per_batch_byte": round(written / whole, 3),
        "read_by_all_ranks_per_batch_byte": round(sum(each["rchar"] for each in found) / whole, 3),
        "sent_bytes": link.sent_bytes,
        "seconds": round(seconds, 1),
        "gb_per_s_written_flushed_and_read": round(whole / seconds / 1e9, 2),
        "orchestrator_cpu_s_per_gb": round(spent / whole * 1e9, 2),
        "ranks_cpu_s_per_gb": round(sum(each["cpu_s"] for each in found) / whole * 1e9, 2),
        "loop_lag_p99_ms": round(1e3 * float(np.percentile(late, 99)), 1),
        "loop_lag_but_for_waits_for_a_cpu_p99_ms": round(1e3 * float(np.percentile(own, 99)), 1),
        "peak_memory_beside_rollouts_per_batch_byte": round((max(used) - before) / whole, 3),
        "one_file_alone": alone,
    }


def _alone(source: Path, directory: Path) -> dict[str, Any]:
    """Compare one rank's file with a plain loop over the same bytes on the same disk. Return the best runs."""
    frames: list[Frame] = [memoryview(source.read_bytes())]
    size, room = len(frames[0]), np.ones(source.stat().st_size, np.uint8)
    places: dict[int, NDArray[np.uint8]] = {}

    def plain_write() -> None:
        with (directory / "plain").open("wb", buffering=0) as file:
            file.write(frames[0])
            os.fsync(file.fileno())

    def plain_read() -> None:
        with source.open("rb", buffering=0) as file:
            file.readinto(room.data)

    def read() -> None:
        batch_files.read(source, lambda size: places.setdefault(size, np.empty(size, np.uint8)), LARGEST_BATCH)

    def cold(action: Callable[[], None]) -> Callable[[], None]:
        def dropped() -> None:
            with source.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            action()

        return dropped

    parts: dict[str, Callable[[], object]] = {
        "write": lambda: batch_files.write(directory / "share", frames),
        "plain_write": plain_write,
        "read_from_disk": cold(read),
        "plain_read_from_disk": cold(plain_read),
        "read_from_page_cache": read,
        "plain_read_from_page_cache": plain_read,
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(TIMES):
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - begin)
    return {
        "mb": round(size / 1e6, 1),
        "gb_per_s": {name: round(size / min(s) / 1e9, 2) for name, s in seconds.items()},
    }


def _counted() -> dict[str, int]:
    """Return the kernel's count of bytes that this process has read and written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


async def _ranks(address: str, number: int) -> bytes:
    command = [sys.executable, "-m", __name__, address, str(number)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out


def _read_all(address: str, number: int) -> None:
    """Run the ranks of one process, and print how much they have read."""
    os.nice(GIVE_WAY)
    rooms: queue.Queue[dict[int, NDArray[np.uint8]]] = queue.Queue()
    for _ in range(AT_ONCE):
        rooms.put({})
    done: list[bool] = []

    def fetch(dp_rank: int, cp_rank: int) -> None:
        room = rooms.get()

        def empty(size: int) -> NDArray[np.uint8]:
            return np.empty(size, np.uint8) if size < LARGE else room.setdefault(size, np.empty(size, np.uint8))

        link = TrainerLink(address, empty=empty)
        batch = link.get_batch(1, RankShard(dp_rank, DP, cp_rank, CP), 900)
        assert batch is not None and all(row.routed_experts is not None for row in batch.rows)
        link.close()
        done.append(True)
        rooms.put(room)

    before, spent = _counted(), time.process_time()
    places = [(dp_rank, cp_rank) for dp_rank in range(DP) for cp_rank in range(CP)][number::PROCESSES]
    fetch(*places[0])  # alone, because the first one creates what all threads share
    threads = [threading.Thread(target=fetch, args=place) for place in places[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(places)
    print(json.dumps({"rchar": _counted()["rchar"] - before["rchar"], "cpu_s": time.process_time() - spent}))


if __name__ == "__main__":
    _read_all(sys.argv[1], int(sys.argv[2]))
