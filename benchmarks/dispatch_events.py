"""CPU time of the dispatcher per finished rollout: `python -m benchmarks dispatch_events [--write]`.

The real dispatcher and the check for failing environments run after every rollout. Rollouts take half a minute on
average under a simulated clock, so that with ten thousand in flight 333 end per second. Medians of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.telemetry.rollout_failures import RolloutFailures
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "dispatch_events.json"
SIZES = (100, 1_000, 3_000, 10_000, 30_000)
GROUP, SECONDS, REPLICAS = 16, 30.0, 16
ROUNDS, ENDED = 9, 500
TOKENS = np.ones(2, np.int32)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks dispatch_events", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args(words).write
    rows = [measure(size) for size in SIZES]
    result: dict[str, Any] = {
        "command": "python -m benchmarks dispatch_events --write",
        "cpus": os.cpu_count(),
        "sizes": rows,
    }
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result, indent=1))
    if write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def measure(size: int) -> dict[str, float]:
    now, source = 0.0, random.Random(0)
    limits = DispatchLimits({"e": GROUP}, max(GROUP, size // 2 // GROUP * GROUP), size, 8, 10**9, {"e": 1.0})
    routers = [f"r{index}" for index in range(REPLICAS)]
    dispatch = Dispatcher(limits, routers, "s", "i", clock=lambda: now)
    failures = RolloutFailures(10**9, {"e": 8})
    dispatch.version = 0
    jobs: list[Job] = []

    def begin() -> None:
        while job := dispatch.next_job({"e"}):
            jobs.append(job)
            failures.started(job, now)

    began = time.process_time()
    begin()
    filling, rounds = time.process_time() - began, []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(ENDED):
            now += SECONDS / size
            index = source.randrange(len(jobs))
            jobs[index], jobs[-1] = jobs[-1], jobs[index]
            job = jobs.pop()
            info = RolloutInfo(job.id, job.group, "e", 0, reward=1.0)
            rollout = Rollout(info, TOKENS, TOKENS.astype(bool), TOKENS.astype(np.float32), TOKENS * 0)
            failures.finished(job.id, "e", now)
            if (group := dispatch.finished(job.id, (rollout,))) is not None:
                dispatch.rejected(group, "counted")
            begin()
            failures.hopeless(now, dispatch.runs, {"e"})
        rounds.append(time.process_time() - began)
    return {
        "inflight": dispatch.inflight,
        "open_groups": len(dispatch.open),
        "us_to_begin_one": round(1e6 * filling / size, 1),
        "us_for_one_that_ends": round(1e6 * statistics.median(rounds) / ENDED, 1),
    }
