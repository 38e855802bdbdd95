"""Restart with 10,000 finished groups on disk: `python -m benchmarks spooled_groups [GROUPS]`.

GLM-5's groups have 16 rollouts of 131,072 tokens with routed experts (75 layers, top 8, uint8), 1.3 GB each. Files are
sparse: real head and size, and holes for the rollouts, which a restart does not read. The real `recover` reads them.
For comparison: the cost of reading one whole group, and of all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.pipeline.progress import RunProgress, recover
from primeslurm.orchestrator.rollouts.groups import RolloutGroup, begin, digest_of
from primeslurm.orchestrator.rollouts.spool import Spool, open_group
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

TOKENS, LAYERS, TOP_K, MEMBERS = 131_072, 75, 8, 16
LABEL = "reverse-text"
RECIPE = {
    "schema": 1,
    "name": "spooled",
    "max_steps": 100,
    "seq_len": TOKENS,
    "model": {"path": "model"},
    "environments": [{"id": LABEL}],
    "orchestrator": {"batch_size": 256, "group_size": MEMBERS},
    "deployment": {"train": {"nodes": 1, "gpus_per_node": 1}, "inference": {"type": "multi_node", "gpus_per_node": 1}},
}
# Frames of a spool file before its rollouts.
HEADS = 4


def made(example: int) -> RolloutGroup:
    """Return a group whose arrays are zeros, shared by all rollouts and not backed by memory."""
    arrays: dict[str, Any] = {"token_ids": np.zeros(TOKENS, np.int32), "mask": np.ones(TOKENS, np.bool_)}
    arrays |= {"logprobs": np.zeros(TOKENS, np.float32), "versions": np.zeros(TOKENS, np.int32)}
    arrays["routed_experts"] = np.zeros((TOKENS, LAYERS, TOP_K), np.uint8)
    name = f"reverse-text-{example:08d}"
    infos = [RolloutInfo(f"{name}/{i}", name, "reverse-text", 0, float(i % 2)) for i in range(MEMBERS)]
    return RolloutGroup(name, "reverse-text", example, 0, tuple((Rollout(info, **arrays),) for info in infos))


def cpu_s() -> float:
    """Return the CPU time of this process [s]."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_bytes() -> int:
    """Return the bytes that this process has read from page cache or disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def measure(count: int, directory: Path) -> dict[str, Any]:
    """Make the files, and recover."""
    spool, one = Spool(directory / "rollouts"), made(0)
    rest = one.to_parts()[HEADS:]
    size, digest = sum(memoryview(part).nbytes for part in rest), digest_of(rest)
    for example in range(count):
        group = replace(one, id=f"{LABEL}-{example:08d}", example=example)
        with (directory / "rollouts" / f"{group.id}.group").open("wb") as file:
            file.writelines(begin(group.head(size, digest)))
            file.truncate(file.tell() + size)
    recipe = Recipe.model_validate(RECIPE)
    arguments = OrchestratorArguments(directory, 1, "run", "", "", ["router-0"], ["engine-r0-0"])
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    curricula = Curricula(recipe, directory / OUTCOMES)
    began, cpu, read = time.perf_counter(), cpu_s(), read_bytes()
    dispatch, gone = recover(recipe, arguments, RunProgress(1), spool, batches, curricula)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 2), "cpu_s": round(cpu_s() - cpu, 2)}
    assert len(dispatch.ready) == count and not gone
    found |= {"bytes_read": read_bytes() - read, "apparent_bytes": count * size}
    found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found | {"one_group_read_whole": whole(one, directory, count)}


def whole(one: RolloutGroup, directory: Path, count: int) -> dict[str, Any]:
    """Read one whole group, as a restart without heads would, which needs its size in memory."""
    path = directory / "one.group"
    with path.open("wb") as file:
        for part in one.to_parts():
            if memoryview(part).nbytes == TOKENS * LAYERS * TOP_K:
                file.seek(memoryview(part).nbytes, os.SEEK_CUR)
            else:
                file.write(part)
        file.truncate()
    began, cpu = time.perf_counter(), cpu_s()
    again = open_group(path).whole()
    seconds, used = time.perf_counter() - began, cpu_s() - cpu
    assert again.newest_version == one.newest_version
    return {"seconds": round(seconds, 2), "cpu_s": round(used, 2), "cpu_s_of_all": round(used * count)}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks spooled_groups", description=__doc__)
    parser.add_argument("groups", nargs="?", type=int, default=10_000)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="spooled-groups-") as directory:
        print(json.dumps(measure(options.groups, Path(directory)), indent=2))
