"""Seconds for check, plan and render of large runs: `python benchmarks/plan_scale.py [--write]`.

Each size is recipes/glm5_pd.yaml with more train nodes and replicas; the whole command is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from primeslurm.plan.checks import advise, model_files, review
from primeslurm.plan.derive import derive
from primeslurm.recipe.load import load_recipe, load_site
from primeslurm.slurm.render import render

ROOT = Path(__file__).resolve().parents[1]
RECIPE, SITE = ROOT / "recipes" / "glm5_pd.yaml", ROOT / "sites" / "h200.yaml"
RESULT = ROOT / "benchmarks" / "results" / "plan_scale.json"
SIZES = {28: (12, 1), 256: (128, 8), 1024: (512, 32)}
"""Train nodes and inference replicas (of 16 nodes) by the number of GPU nodes."""
REPEATS = 3


def main() -> None:
    """Measure every size, print, and with --write keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args().write
    rows = [measure(nodes) for nodes in SIZES]
    result = {
        "command": "python benchmarks/plan_scale.py --write",
        "machine": {"cpus": 2, "processor": platform.processor() or platform.machine()},
        "python": platform.python_version(),
        "best_of": REPEATS,
        "sizes": rows,
    }
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measure(nodes: int) -> dict[str, object]:
    """Best seconds of each part, and of the whole command `primeslurm render`."""
    train, replicas = SIZES[nodes]
    overrides = [f"deployment.train.nodes={train}", f"deployment.inference.num_replicas={replicas}"]
    site = load_site(SITE)
    recipe = load_recipe(RECIPE, overrides)
    plan = derive(recipe, site, Path("/shared/run"))
    model = model_files(recipe)
    parts: dict[str, Callable[[], object]] = {
        "load": lambda: load_recipe(RECIPE, overrides),
        "check": lambda: (review(recipe, site, model), advise(recipe, plan)),
        "plan": lambda: derive(recipe, site, Path("/shared/run")),
        "render": lambda: render(plan),
        "json": plan.to_json,
    }
    seconds = {name: best(part) for name, part in parts.items()}
    argv = [sys.executable, "-m", "primeslurm", "render", str(RECIPE), "--site", str(SITE)]
    argv += [word for override in overrides for word in ("--set", override)]
    command = best(lambda: subprocess.run(argv, cwd=ROOT, capture_output=True, check=True))
    return {
        "gpu_nodes": nodes,
        "gpus": plan.totals.gpus,
        "processes": len(plan.processes()),
        "plan_bytes": len(plan.to_json()),
        "script_lines": len(render(plan).splitlines()),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "load_check_plan_render": round(sum(seconds[name] for name in ("load", "check", "plan", "render")), 4),
        "command_primeslurm_render": round(command, 3),
    }


def best(part: Callable[[], object]) -> float:
    """The shortest of a few runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        part()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
