"""Whole jobs at full size: `recipes/glm5_pd.yaml`, emulated on 28 to 512 nodes.

Needs root and Slurm's daemons. With 256 and 512 nodes each has one GPU, and 512 nodes fit into 24 GB only with --merge-
pages. Result: benchmarks/results/emulated_scale_<nodes>.json, one file per size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from primeslurm.base.files import read_json
from primeslurm.plan.model import Plan
from primeslurm.records.events.processes import ProcessStarted
from primeslurm.records.state import OrchestratorState
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.testbed.embedded_slurm.page_merging import are_merged

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Number of trainer nodes, and of inference replicas (12 prefill and 4 decode nodes), by number of nodes.
SIZES = {28: (12, 1), 64: (32, 2), 128: (64, 4), 256: (96, 10), 512: (192, 20)}
# Largest size with all GPUs of a node. Larger ones have one GPU per node.
WHOLE_NODES = 128
ONE_GPU = {
    "deployment.train.gpus_per_node": 1,
    "deployment.inference.prefill.gpus_per_node": 1,
    "deployment.inference.decode.gpus_per_node": 1,
    "inference.prefill.all2all": "allgather_reducescatter",  # DeepEP needs whole nodes
    "inference.decode.all2all": "allgather_reducescatter",
}
KSM = Path("/sys/kernel/mm/ksm")
# At the kernel's default pace, merging the memory of a hundred processes would take minutes.
MERGING = {"run": "1", "pages_to_scan": "8000"}
# At its default of 5 the kernel's thread would get no CPU time beside the processes.
KSMD_NICE = -10
KINDS = (
    "emulated.engine",
    "emulated.trainer",
    "emulated.environment",
    "submitit",
    "primeslurm.orchestrator",
    "inference.router",
    "vllm::router",
)
# Polling interval for 128 nodes [s]. It grows with the number of nodes, as polling all processes takes longer.
PERIOD_S = 1.0


@dataclass
class Usage:
    """Resource use of the run's processes, by kind."""

    before: int = field(default_factory=lambda: psutil.virtual_memory().used)
    peak_bytes: int = 0
    count: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    private_bytes: dict[str, int] = field(default_factory=dict)

    def look(self, memory: bool) -> None:
        """Take a sample. `memory` includes each process's private memory, which is slow."""
        self.peak_bytes = max(self.peak_bytes, psutil.virtual_memory().used - self.before)
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            kind = next((kind for kind in KINDS if kind in line), None)
            if kind:
                found.setdefault(kind, []).append(process)
        for kind, processes in found.items():
            self.count[kind] = max(self.count.get(kind, 0), len(processes))
            self.cpu_s[kind] = max(self.cpu_s.get(kind, 0.0), sum(map(_cpu_seconds, processes)))
            if memory:
                self.private_bytes[kind] = sum(map(_private_bytes, processes))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _private_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def primeslurm(*args: str, cwd: Path) -> str:
    """Run a command and return its output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "primeslurm", *args]
    return subprocess.run(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(recipe: Path, nodes: int, steps: int, where: Path) -> dict[str, Any]:
    """Measure one run from its submission to its last step."""
    train, replicas = SIZES[nodes]
    name = f"scale-{nodes}"
    changes = {
        "max_steps": steps,
        "deployment.train.nodes": train,
        "deployment.inference.num_replicas": replicas,
        "checkpoint.interval": 5,
        **(ONE_GPU if nodes > WHOLE_NODES else {}),
    }
    options = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    usage, load_before = Usage(), os.getloadavg()
    began = time.time()
    answer = json.loads(primeslurm("submit", str(recipe), "--emulate", "--name", name, "--json", *options, cwd=where))
    try:
        run = RunDirectory(Path(answer["directory"]))
        seen = follow(run, usage, PERIOD_S * max(1.0, nodes / WHOLE_NODES))
        found = report(run, usage, began, seen)
        return found | {"load_before": load_before, "steps": steps, "pages_merged": are_merged()}
    finally:
        primeslurm("cluster", "down", "--name", f"emulate-{name}", cwd=where)


@contextmanager
def merging() -> Iterator[None]:
    """Enable page merging within the block."""
    before = {name: (KSM / name).read_text() for name in MERGING}
    ksmd = next(process for process in psutil.process_iter(["name"]) if process.info["name"] == "ksmd")
    nice = ksmd.nice()
    ksmd.nice(KSMD_NICE)
    for name, value in MERGING.items():
        (KSM / name).write_text(value)
    try:
        yield
    finally:
        ksmd.nice(nice)
        for name, value in before.items():
            (KSM / name).write_text(value)


def follow(run: RunDirectory, usage: Usage, period_s: float) -> dict[str, float]:
    """Poll until the run ends, and return the time at which each milestone was first seen."""
    attempt, seen, turn = run.attempt(1), {}, 0
    plan = attempt.plan()
    while attempt.end() is None:
        fleet = attempt.fleet()
        states = fleet.states if fleet else {}
        if "healthy" not in seen and states and set(states.values()) == {"HEALTHY"}:
            seen["healthy"] = time.time()
        state = attempt.state("orchestrator", OrchestratorState)
        if "first_token" not in seen and state and state.inflight and _tokens(attempt, plan):
            seen["first_token"] = time.time()
        turn += 1
        usage.look(memory=turn % 30 == 0)
        time.sleep(period_s)
    return seen


def _tokens(attempt: Any, plan: Plan) -> bool:
    """Return whether any prefill engine has sampled a token."""
    known = read_json(attempt.addresses_file) or {}
    for process in plan.processes():
        if process.role == "prefill":
            url = f"http://{known['hosts'][process.name]}:{known['ports'][process.name]['http']}/metrics"
            try:
                lines = httpx.get(url, timeout=5).text.splitlines()
            except httpx.HTTPError:
                continue  # not up yet, or too busy to answer
            if any(line.startswith("vllm:generation_tokens_total") and not line.endswith(" 0") for line in lines):
                return True
    return False


def report(run: RunDirectory, usage: Usage, began: float, seen: dict[str, float]) -> dict[str, Any]:
    """Return the result."""
    attempt = run.attempt(1)
    job, end, plan, table = attempt.job(), attempt.end(), attempt.plan(), rows(run.path)
    assert job is not None and end is not None
    if end.outcome != "completed":
        raise SystemExit(f"attempt 1 ended as {end.outcome}: {end.reason}")
    agents = usage.count["submitit"]
    happened = events(run)
    return {
        "nodes": plan.totals.nodes,
        "gpus": plan.totals.gpus,
        "processes": len(plan.processes()),
        "outcome": end.outcome,
        "cluster_up_seconds": round(job.submitted_at - began, 1),
        "submit_to_all_healthy_seconds": round(seen["healthy"] - job.submitted_at, 1),
        "submit_to_first_token_seconds": round(seen["first_token"] - job.submitted_at, 1),
        "submit_to_end_seconds": round(end.time - job.submitted_at, 1),
        "step_seconds": [round(row["throughput/step_seconds"], 1) for row in table],
        "update_seconds": [round(row["policy/update_seconds"], 2) for row in table],
        "reward_first_last": [table[0]["reward/mean"], table[-1]["reward/mean"]],
        "restarts": sum(isinstance(event, ProcessStarted) and event.restarts > 0 for event in happened),
        "peak_memory_gb": round(usage.peak_bytes / 1e9, 2),
        "private_memory_mb_each": {k: round(b / usage.count[k] / 1e6, 1) for k, b in usage.private_bytes.items()},
        "cpu_seconds": {kind: round(seconds, 1) for kind, seconds in usage.cpu_s.items()},
        "agent_cpu_seconds_each": round(usage.cpu_s["submitit"] / agents, 2),
        "agent_cpu_share_each": round(usage.cpu_s["submitit"] / agents / (end.time - job.submitted_at), 4),
        "machine": {"cores": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9, 1)},
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks emulated_scale", description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[28])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--merge-pages", action="store_true", help="switch the kernel's KSM on meanwhile")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "glm5_pd.yaml")
    options = parser.parse_args(words)
    for nodes in options.nodes:
        merged = merging() if options.merge_pages else nullcontext()
        with tempfile.TemporaryDirectory(prefix="primeslurm-scale-") as directory, merged:
            result = measure(options.recipe.resolve(), nodes, options.steps, Path(directory))
        path = RESULTS / f"emulated_scale_{nodes}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
