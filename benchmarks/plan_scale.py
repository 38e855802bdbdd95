"""Time of check, plan and render for large runs: `python -m benchmarks plan_scale [--write]`.

Each size is recipes/glm5_pd.yaml with more train nodes and replicas. The whole command runs in a separate process. The
size of the plan file is reported as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from primeslurm.api.checks.recipe_check import read_file_metadata
from primeslurm.plan.checks.run_checks import check_plan, check_run
from primeslurm.plan.model import Plan
from primeslurm.plan.plan_file import from_file, plain, to_file
from primeslurm.plan.planner import derive, requests_of
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.run.status.plan_outline import PlanOutline
from primeslurm.slurm.render import render

ROOT = Path(__file__).resolve().parents[1]
RECIPE, SITE = ROOT / "recipes" / "glm5_pd.yaml", ROOT / "sites" / "h200.yaml"
RESULT = ROOT / "benchmarks" / "results" / "plan_scale.json"
# Train nodes and inference replicas (of 16 nodes) by number of GPU nodes.
SIZES = {28: (12, 1), 256: (128, 8), 1024: (512, 32)}
REPEATS = 5


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan_scale", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args(words).write
    rows = [measure(nodes) for nodes in SIZES]
    result = {
        "command": "python -m benchmarks plan_scale --write",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load_average": os.getloadavg()[0]},
        "python": platform.python_version(),
        "best_of": REPEATS,
        "sizes": rows,
    }
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(nodes: int) -> dict[str, object]:
    """Return the shortest time of each part, and of the whole command `primeslurm render`."""
    train, replicas = SIZES[nodes]
    overrides = [f"deployment.train.nodes={train}", f"deployment.inference.num_replicas={replicas}"]
    site = load_site(SITE)
    recipe = load_recipe(RECIPE, overrides)
    plan = derive(recipe, site, Path("/shared/run"))
    files, (requests, _) = read_file_metadata(recipe), requests_of(recipe, site, local=False)
    file, text = to_file(plan), plan.to_json()
    parts: dict[str, Callable[[], object]] = {
        "load": lambda: load_recipe(RECIPE, overrides),
        "check": lambda: (check_run(recipe, site, requests, files.model, files.teacher), check_plan(recipe, plan)),
        "plan": lambda: derive(recipe, site, Path("/shared/run")),
        "render": lambda: render(plan),
        "json": plan.to_json,
        "write_file": lambda: to_file(plan),
        "read_file": lambda: from_file(file),
        "read_file_to_watch": lambda: msgspec.convert(plain(file), PlanOutline),
        "read_json": lambda: Plan.model_validate_json(text),
    }
    seconds = {name: best(part) for name, part in parts.items()}
    argv = [sys.executable, "-m", "primeslurm", "render", str(RECIPE), "--site", str(SITE)]
    argv += [word for override in overrides for word in ("--set", override)]
    command = best(lambda: subprocess.run(argv, cwd=ROOT, capture_output=True, check=True))
    return {
        "gpu_nodes": nodes,
        "gpus": plan.totals.gpus,
        "processes": len(plan.processes()),
        "plan_json_bytes": len(text),
        "plan_file_bytes": len(file),
        "script_lines": len(render(plan).splitlines()),
        "seconds": {name: round(clock, 4) for name, (clock, _) in seconds.items()},
        "load_check_plan_render": _sums(seconds[name] for name in ("load", "check", "plan", "render")),
        "command_primeslurm_render": _sums([command]),
    }


def _sums(measured: Iterable[tuple[float, float]]) -> dict[str, float]:
    clock, cpu = zip(*measured, strict=True)
    return {"seconds": round(sum(clock), 3), "cpu_seconds": round(sum(cpu), 3)}


def best(part: Callable[[], object]) -> tuple[float, float]:
    """Return the shortest of a few runs: elapsed and CPU seconds. Other load affects CPU time less."""
    clock, cpu = [], []
    for _ in range(REPEATS):
        began, used = time.perf_counter(), _cpu_seconds()
        part()
        clock.append(time.perf_counter() - began)
        cpu.append(_cpu_seconds() - used)
    return min(clock), min(cpu)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children [s]."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
