"""Time of the dashboard's first page with many runs, of the page of a long run, and its CPU time while one is watched.

Starts the real server over 500 runs, of which one has trained 5,000 steps, and asks as a browser would. `first` is the
time of the first request after the start, `again` that of a later one. Prints JSON; takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks.status_scale import make
from primeslurm.base.files import write_json
from primeslurm.records.attempt import EndRecord
from primeslurm.records.fleet import FleetView
from primeslurm.run.directory import RunDirectory

STEPS = 5000
METRICS = 150
WATCHED_S = 60.0
SHORT_STEPS = 50


def rows(steps: range) -> str:
    """Return rows of metrics.jsonl as large as those of a run with several environments."""
    noise = random.Random(steps.start)
    names = [f"env/task-{i}/metric" for i in range(METRICS - 20)]
    named = ["reward/mean", "reward/std", "trainer/loss", "trainer/entropy", "trainer/mismatch_kl", "trainer/grad_norm"]
    named += ["throughput/step_seconds", "throughput/tokens_per_s", "staleness/mean", "staleness/max", "queue/inflight"]
    named += [f"engines/decode/{name}" for name in ("kv_usage_mean", "running_mean", "waiting_mean")]
    named += [f"trainer/seconds/{name}" for name in ("wait", "forward_backward", "optimizer", "publish", "snapshot")]
    lines = []
    for step in steps:
        row = {"step": step, "time": 1.79e9 + 30 * step, **{name: noise.random() for name in (*named, *names)}}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def make_runs(root: Path, count: int, steps: int) -> tuple[Path, RunDirectory]:
    """Make `count` runs of 28 nodes. The last one is active and has trained `steps` steps; the others have ended."""
    directory, short = root / "runs", rows(range(1, SHORT_STEPS + 1))
    directory.mkdir()
    template = make(root, 28)
    for i in range(count):
        path = directory / f"run-{i:04d}"
        shutil.copytree(template.path, path)
        write_json(path / "lock.json", {"run_id": path.name, "created_at": 1.79e9 + i})
        last = i == count - 1
        (path / "metrics.jsonl").write_text(rows(range(1, steps + 1)) if last else short)
        if not last:
            end = EndRecord("completed", "all steps done", "", SHORT_STEPS, False, "", 1.79e9)
            RunDirectory(path).attempt(1).record_end(end)
    return directory, RunDirectory(path)


class Served:
    """A dashboard in a process of its own."""

    def __init__(self, runs: Path) -> None:
        argv = [sys.executable, "-m", "primeslurm", "dashboard", str(runs)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        self.client = httpx.Client(base_url=url.partition("/?")[0], timeout=120, trust_env=False)
        while True:
            try:
                assert self.client.get(url, follow_redirects=True).status_code == 200
                break
            except httpx.ConnectError:
                time.sleep(0.05)

    def get(self, path: str) -> float:
        """Return the seconds that an answer takes."""
        begin = time.perf_counter()
        assert self.client.get(path).status_code == 200
        return time.perf_counter() - begin

    def cpu(self) -> float:
        """Return the CPU time so far [s]."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_mb(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss / 1e6)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def page(served: Served, *paths: str) -> dict[str, float]:
    """Return the time of a page's requests, the first time and again [s]."""
    first, again = (sum(served.get(f"/api/{path}") for path in paths) for _ in range(2))
    return {"first": round(first, 3), "again": round(again, 3)}


def watch(served: Served, run: RunDirectory, steps: int, seconds: float) -> dict[str, float]:
    """Return the share of a core that the dashboard uses while a browser watches a run that trains a step per 5 s."""
    view = run.latest().fleet() or FleetView(0.0)
    before, begin, step = served.cpu(), time.monotonic(), steps
    with served.client.stream("GET", f"/api/runs/{run.name}/live?rows={steps}&generation=0") as stream:
        events, lines = 0, stream.iter_lines()
        while time.monotonic() - begin < seconds:
            if time.monotonic() - begin > 5 * (step - steps):
                step += 1
                with (run.path / "metrics.jsonl").open("a") as file:
                    file.write(rows(range(step, step + 1)))
            write_json(run.latest().fleet_file, msgspec.to_builtins(msgspec.structs.replace(view, time=time.time())))
            events += next(lines).startswith("event: ")
    took = time.monotonic() - begin
    return {"seconds": round(took, 1), "events": events, "share_of_a_core": round((served.cpu() - before) / took, 4)}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks dashboard", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=WATCHED_S, help="time for which a run is watched")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as directory:
        runs, long = make_runs(Path(directory), args.runs, args.steps)
        served = Served(runs)
        try:
            result: dict[str, Any] = {
                "list_s": page(served, "runs"),
                "run_s": page(served, f"runs/{long.name}/status", f"runs/{long.name}/curves"),
                "watching": watch(served, long, args.steps, args.seconds),
                "memory_mb": round(served.memory_mb()),
            }
        finally:
            served.close()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    head = {"command": "python -m benchmarks dashboard", "machine": machine, "runs": args.runs, "steps": args.steps}
    print(json.dumps({**head, **result}, indent=2))
