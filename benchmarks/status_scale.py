"""Time of `primeslurm status` for large runs.

Makes the files of a run with 8 GPUs per node (real plans, and the records of head, agents and orchestrator), and times
the whole command in a separate process. Prints JSON; takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from primeslurm.base.files import write_json
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe, Site
from primeslurm.records.attempt import JobRecord
from primeslurm.records.events.nodes import AgentStarted
from primeslurm.records.fleet import AgentReport, AssignedAgent, AssignmentRecord, FleetView, ProcessReport
from primeslurm.records.journal import Journal
from primeslurm.records.state import EngineRecord, Load, OrchestratorState
from primeslurm.run.directory import Attempt, RunDirectory

REPEATS = 5
STEPS = 400
LOAD = Load(engines=24, running=30, waiting=9, kv_usage=0.7, seconds=60, generated_per_s=900)


def make(root: Path, nodes: int) -> RunDirectory:
    """Make a run in the middle of its work: half of the nodes train, and replicas have 3 prefill and 1 decode node."""
    replicas = nodes // 8
    inference = {
        "type": "disaggregated",
        "num_replicas": replicas,
        "prefill": {"num_replicas": 3},
        "decode": {"num_replicas": 1},
    }
    recipe = Recipe.model_validate(
        {
            "schema": 1,
            "name": f"run{nodes}",
            "max_steps": STEPS,
            "seq_len": 4096,
            "model": {"path": "/models/m"},
            "environments": [{"id": "reverse-text"}],
            "deployment": {"train": {"nodes": nodes - 1 - 4 * replicas}, "inference": inference},
        }
    )
    kinds = {"default": {"partition": "gpu", "gpus": 8, "cpus": 64}, "control": {"partition": "cpu", "cpus": 16}}
    site = Site.model_validate({"schema": 1, "name": "s", "device": "cuda", "runs": str(root), "nodes": kinds})
    run = RunDirectory(root / recipe.name)
    plan = derive(recipe, site, run.path)
    attempt = run.attempt(1)
    attempt.prepare(plan)
    attempt.record_job(JobRecord("7", "slurm", time.time()))
    write_json(run.path / "lock.json", {"run_id": f"{recipe.name}-1", "created_at": time.time()})
    (run.path / "recipe.resolved.json").write_text(recipe.model_dump_json(by_alias=True))
    _say(attempt, plan, run)
    return run


def _say(attempt: Attempt, plan: Plan, run: RunDirectory) -> None:
    now = time.time()
    states = {process.name: "HEALTHY" for process in plan.processes()} | {"router-0": "RESTARTING"}
    # The time is in the future, so that heartbeats stay fresh.
    write_json(attempt.fleet_file, msgspec.to_builtins(FleetView(now + 3600, states=states)))
    agents = {node.index: AssignedAgent(node.index, f"n{node.index:04d}") for node in plan.nodes}
    write_json(attempt.assignment_file, msgspec.to_builtins(AssignmentRecord(1, agents)))
    for node in plan.nodes:
        name, beats = f"n{node.index:04d}", {process.name: ProcessReport("ready", 42) for process in node.processes}
        report = AgentReport(node.index, name, "10.0.0.1", now, 7, node=node.index, processes=beats)
        write_json(attempt.agent_file(node.index), msgspec.to_builtins(report))
        Journal(attempt.path, f"agent-{node.index}").write(AgentStarted(name, report.address))
    loads = {"prefill": LOAD, "decode": LOAD}
    engines = {name: EngineRecord("CURRENT", now, 300) for r in plan.replicas for name in r.engines}
    replicas = {str(replica.index): loads for replica in plan.replicas}
    state = OrchestratorState(step=300, version=300, ready_groups=5, engines=engines, roles=loads, replicas=replicas)
    Journal(attempt.path, "orchestrator").state(state)
    rows = [{"step": i, "reward/mean": i / STEPS, **{f"m{j}": float(j) for j in range(60)}} for i in range(1, 301)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(run: RunDirectory, *options: str) -> dict[str, float]:
    """Return the shortest of five runs of the whole command [s]. `cpu` is CPU time, which other load hardly affects."""
    argv = [sys.executable, "-m", "primeslurm", "status", str(run.path), *options]
    times, used = [], []
    for _ in range(REPEATS):
        begin, before = time.perf_counter(), _cpu()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
        used.append(_cpu() - before)
    return {"wall": round(min(times), 2), "cpu": round(min(used), 2)}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks status_scale", description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[28, 128, 1024])
    sizes = parser.parse_args(words).nodes
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for nodes in sizes:
            run = make(Path(directory), nodes)
            processes = sum(len(node.processes) for node in run.latest().plan().nodes)
            seconds = {"status": measure(run), "status --json --processes": measure(run, "--json", "--processes")}
            results.append({"nodes": nodes, "processes": processes, "seconds": seconds})
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(
        json.dumps({"command": "python -m benchmarks status_scale", "machine": machine, "results": results}, indent=2)
    )
