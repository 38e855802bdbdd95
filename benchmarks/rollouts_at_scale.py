"""Orchestrator cost of rollouts in flight: `python -m benchmarks rollouts_at_scale [--sizes 100 ...] [--write]`.

The orchestrator, job protocol, spool and weight update loop are real. The controller is real, too, unless `--static`
starts all rollouts at once, as for the recorded results. There are 128 emulated engines, each a replica with its own
port; environment workers that send each of a rollout's 100 turns to its engine with the real client; and a trainer that
takes every batch, so that policies change. A turn takes 90 s at any size. Not included: GPU computation, verifiers with
its token client, routed experts, and vllm-router, which the orchestrator does not talk to.

The first groups start somewhere between their first and last turn, so that groups end evenly, as in the middle of a
long run. Measured once all slots are in use: CPU seconds by kind of process, memory, open files, and the lag of the
orchestrator's event loop. `busy` is the lag by CPU time, which excludes other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support import rollouts_at_scale as parts
from benchmarks.support.ports import HOST, free_port
from benchmarks.support.rollouts_at_scale import Lag, Place
from primeslurm.base.files import read_json, write_json
from primeslurm.orchestrator.rollouts.job_protocol import on_this_node

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "rollouts_at_scale.json"
SIZES = (100, 1_000, 3_000, 10_000)
ENGINES, SERVERS, WORKERS, GROUP = 128, 2, 8, 4
SECONDS = 240.0
# Share of slots that must be in use before the measurement, and the longest time to reach it [s].
FILLED, FILLED_S = 0.98, 900.0


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rollouts_at_scale", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="rollouts in flight")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to measure for")
    parser.add_argument("--whole", action="store_true", help="begin with first turns, and measure until as many ended")
    parser.add_argument("--static", action="store_true", help="begin all rollouts at once, whatever engines say")
    parser.add_argument("--keep", type=Path, help="run directories go here, and stay")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(words)
    for size in options.sizes:
        row = measure(size, options)
        print(json.dumps(row, indent=1), flush=True)
        if options.write:
            _keep({"command": " ".join(["python -m benchmarks rollouts_at_scale", *words]), **row})


def _keep(row: dict[str, Any]) -> None:
    """Put a size's row into the result, replacing an earlier one."""
    known = (read_json(RESULT) or {}).get("sizes", [])
    rows = [row, *(other for other in known if other["rollouts"] != row["rollouts"])]
    rows.sort(key=lambda each: int(each["rollouts"]))
    shape = {"engines": ENGINES, "workers": WORKERS, "turns": parts.TURNS, "turn_s": parts.TURN_S}
    write_json(RESULT, {"cpus": os.cpu_count(), **shape, "sizes": rows, **_growth(rows[0], rows[-1])})


def _growth(least: dict[str, Any], most: dict[str, Any]) -> dict[str, Any]:
    """Return the cost per additional rollout in flight, between the smallest and the largest size."""
    more = most["rollouts"] - least["rollouts"]
    if not more:
        return {}

    def each(kind: str, what: str, times: float) -> float:
        return round(float(times * (most[kind][what] - least[kind][what]) / more), 2)

    return {
        "for_each_more_in_flight": {
            "between": [least["rollouts"], most["rollouts"]],
            "orchestrator_kb": each("orchestrator", "rss_mb", 1e3),
            "orchestrator_us_of_cpu_per_s": each("orchestrator", "share_of_a_core", 1e6),
            "workers_kb": each("workers", "rss_mb_each", 1e3 * WORKERS),
            "workers_sockets_and_files": each("workers", "sockets_and_files", 1),
        }
    }


def measure(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one size, in its own run directory."""
    directory = options.keep or Path(tempfile.mkdtemp(prefix="rollouts-"))
    run_dir = Path(directory) / str(size)
    run_dir.mkdir(parents=True)
    try:
        with _running(size, run_dir, staggered=not options.whole, static=options.static) as run:
            return run.measure(size, None if options.whole else options.seconds)
    finally:
        if options.keep is None:
            shutil.rmtree(directory)


@dataclass
class Run:
    """All processes of one size."""

    place: Place
    processes: dict[str, list[psutil.Process]]
    turns: list[Any]
    lag: Any
    worker_lag: list[Any]

    def measure(self, size: int, seconds: float | None) -> dict[str, Any]:
        """Wait until all slots are in use, then for `seconds` or until as many rollouts as slots have ended."""
        began = time.monotonic()
        while self._state().get("inflight", 0) < FILLED * size:
            self._alive()
            if time.monotonic() - began > FILLED_S:
                sys.exit(f"{self._state().get('inflight')} of {size} rollouts are in flight after {FILLED_S:.0f} s")
            time.sleep(0.5)
        filled_s = time.monotonic() - began
        if seconds is not None:
            time.sleep(parts.TURN_S)  # each rollout has had a turn since
        for lag in (self.lag, *self.worker_lag):
            lag[:] = [0] * Lag.room()
        first, seen = self._look(), []
        while not self._is_over(first, size, seconds):
            self._alive()
            time.sleep(1.0)
            seen.append(self._now())
        return {"rollouts": size, "filled_s": round(filled_s, 1), **self._row(first, self._look(), seen)}

    def _is_over(self, first: dict[str, Any], size: int, seconds: float | None) -> bool:
        if seconds is not None:
            return bool(time.monotonic() - first["at"] >= seconds)
        return bool(self._state()["counts"].get("finished", 0) >= size)

    def _row(self, first: dict[str, Any], last: dict[str, Any], seen: list[dict[str, float]]) -> dict[str, Any]:
        seconds = last["at"] - first["at"]
        cpu = {kind: last["cpu"][kind] - first["cpu"][kind] for kind in self.processes}
        ended, turns = last["ended"] - first["ended"], last["turns"] - first["turns"]
        mine = cpu["orchestrator"]
        return {
            "seconds": round(seconds, 1),
            "inflight_mean": round(statistics.fmean(each["inflight"] for each in seen), 1),
            "rollouts_ended": ended,
            "turns": turns,
            "steps": last["steps"] - first["steps"],
            "rollouts_of_a_step": self.place.recipe.orchestrator.batch_size,
            "policy_of_engines": last["policy"],
            "dropped_as_too_old": last["stale"],
            "failed_or_lost_since_start": last["failed"],
            "orchestrator": {
                "share_of_a_core": round(mine / seconds, 4),
                "cpu_ms_per_rollout": round(1e3 * mine / max(1, ended), 2),
                "cpu_us_per_turn": round(1e6 * mine / max(1, turns), 1),
                "rss_mb": round(max(each["rss"] for each in seen), 1),
                "sockets_and_files": max(each["fds"] for each in seen),
                "threads": max(each["threads"] for each in seen),
                "lag": lag_of(self.lag),
            },
            "workers": {
                "cpu_us_per_turn": round(1e6 * cpu["worker"] / max(1, turns), 1),
                "rss_mb_each": round(statistics.fmean(last["rss"]["worker"]), 1),
                "sockets_and_files": sum(last["fds"]["worker"]),
                "lag_of_the_latest": max((lag_of(lag) for lag in self.worker_lag), key=lambda lag: lag["max_ms"]),
            },
            "engines": {
                "cpu_us_per_turn": round(1e6 * cpu["engine"] / max(1, turns), 1),
                "rss_mb_each": round(sum(last["rss"]["engine"]) / ENGINES, 2),
            },
            "load_1m": round(os.getloadavg()[0], 1),
        }

    def _now(self) -> dict[str, float]:
        process = self.processes["orchestrator"][0]
        return {
            "inflight": self._state()["inflight"],
            "rss": process.memory_info().rss / 1e6,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
        }

    def _look(self) -> dict[str, Any]:
        state = self._state()
        counts = state["counts"]
        return {
            "at": time.monotonic(),
            "cpu": {
                kind: sum(sum(process.cpu_times()[:2]) for process in group) for kind, group in self.processes.items()
            },
            "rss": {
                kind: [process.memory_info().rss / 1e6 for process in group] for kind, group in self.processes.items()
            },
            "fds": {kind: [process.num_fds() for process in group] for kind, group in self.processes.items()},
            "ended": counts.get("finished", 0),
            "failed": counts.get("failed", 0) + counts.get("lost", 0),
            "steps": state["step"],
            "stale": counts.get("rollouts_dropped_stale", 0),
            "policy": state["version"],
            "turns": sum(each.value for each in self.turns),
        }

    def _state(self) -> dict[str, Any]:
        return read_json(self.place.run_dir / "attempts" / "1" / "state" / "orchestrator.json") or {}

    def _alive(self) -> None:
        gone = [kind for kind, group in self.processes.items() if not all(_lives(process) for process in group)]
        if gone:
            sys.exit(f"processes ended: {', '.join(gone)}")


def batch_size(size: int) -> int:
    """Return rollouts per step: few, so that several steps are trained during the measurement."""
    return max(GROUP, size // 200 // GROUP * GROUP)


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def lag_of(shared: Any) -> dict[str, float]:
    """Return a loop's lag [ms]: the 99 % and 99.9 % quantiles, and the maximum."""
    longest, busy, probes, *later = list(shared)
    bounds = [*Lag.BOUNDS_MS, longest / 1e3]

    def kept(share: float) -> float:
        return float(
            next(bound for bound, count in zip(bounds, [*later, 0], strict=True) if count <= (1 - share) * probes)
        )

    found = {"p99_ms": kept(0.99), "p999_ms": kept(0.999), "max_ms": longest / 1e3, "busy_max_ms": busy / 1e3}
    return {name: round(value, 1) for name, value in found.items()}


@contextmanager
def _running(size: int, run_dir: Path, *, staggered: bool, static: bool) -> Iterator[Run]:
    wire, env = (f"tcp://{HOST}:{free_port()}" for _ in range(2))
    place = Place(run_dir, wire, env, ENGINES, WORKERS, staggered)
    listening = [socket.create_server((HOST, 0), backlog=1024) for _ in range(ENGINES)]
    routers = [f"router-{index}" for index in range(ENGINES)]
    names = [f"engine-r{index}-0" for index in range(ENGINES)]
    _prepare(
        size,
        run_dir,
        "static" if static else "adaptive",
        {
            name: each.getsockname()[1]
            for group in (routers, names)
            for name, each in zip(group, listening, strict=True)
        },
    )
    spawn = multiprocessing.get_context("spawn")
    turns = [spawn.Value("q", 0, lock=False) for _ in range(WORKERS)]
    lags = [spawn.Array("q", Lag.room(), lock=False) for _ in range(WORKERS + 1)]
    started = {
        "engine": [
            spawn.Process(target=parts.engines, args=(1000 * index, listening[index::SERVERS]))
            for index in range(SERVERS)
        ],
        "orchestrator": [spawn.Process(target=parts.orchestrator, args=(place, routers, names, lags[-1]))],
        "worker": [
            spawn.Process(target=parts.worker, args=(place, index, turns[index], lags[index]))
            for index in range(WORKERS)
        ],
        "trainer": [spawn.Process(target=parts.trainer, args=(place,))],
    }
    everybody = [process for group in started.values() for process in group]
    try:
        for process in everybody:
            process.start()
        for each in listening:
            each.close()
        processes = {kind: [psutil.Process(process.pid) for process in group] for kind, group in started.items()}
        yield Run(place, processes, turns, lags[-1], lags[:-1])
    finally:
        for process in everybody:
            process.kill()
        for process in everybody:
            process.join()
        if (way := on_this_node(env)) is not None:
            way.unlink(missing_ok=True)


def _prepare(size: int, run_dir: Path, concurrency: str, ports: dict[str, int]) -> None:
    """Write the files that a submission and the head have written when the orchestrator starts."""
    from primeslurm.recipe import Recipe

    recipe = Recipe.model_validate(
        {
            "schema": 1,
            "name": "rollouts-at-scale",
            "max_steps": 100_000,
            "seq_len": 2048,
            "model": {"path": str(run_dir)},
            "environments": [{"id": "reverse-text", "name": "agents", "workers": WORKERS}],
            "checkpoint": {"interval": 4},
            "orchestrator": {
                "batch_size": batch_size(size),
                "group_size": GROUP,
                "max_inflight_rollouts": size,
                "concurrency": concurrency,
                "max_off_policy_steps": 400,
                "sampling": {"max_tokens": parts.ANSWER},
            },
        }
    )
    (run_dir / "recipe.resolved.json").write_text(recipe.model_dump_json(by_alias=True))
    attempt = run_dir / "attempts" / "1"
    attempt.mkdir(parents=True)
    hosts = dict.fromkeys(ports, HOST)
    write_json(
        attempt / "addresses.json", {"hosts": hosts, "ports": {name: {"http": port} for name, port in ports.items()}}
    )
