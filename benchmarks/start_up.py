"""CPU time of short commands compared with importing typer, pydantic, yaml and jinja2, which they need.

CPU seconds (user and system), not elapsed time. Commands take turns, so that other load affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "start_up.json"
ROUNDS = 15
RECIPE = ["recipes/glm5_pd.yaml", "--site", "sites/h200.yaml"]
BASE = [sys.executable, "-c", "import typer, pydantic, yaml, jinja2"]
COMMANDS = {"--help": ["--help"], "check": ["check", *RECIPE], "render": ["render", *RECIPE], "plan": ["plan", *RECIPE]}
GOALS = {"--help": 2.0, "check": 3.0, "render": 3.0}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks start_up", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    write = parser.parse_args(words).write
    commands = {"base": BASE} | {name: [sys.executable, "-m", "primeslurm", *words] for name, words in COMMANDS.items()}
    for argv in commands.values():
        cpu_seconds(argv)  # warms the file cache
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, argv in commands.items():
            seconds[name].append(cpu_seconds(argv))
    result = {
        "command": "python -m benchmarks start_up --write",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load_average": os.getloadavg()[0]},
        "python": platform.python_version(),
        "median_of": ROUNDS,
        "cpu_seconds": {name: round(statistics.median(taken), 3) for name, taken in seconds.items()},
        "ratio_to_base": {name: ratio(seconds[name], seconds["base"]) for name in COMMANDS},
        "goals": GOALS,
    }
    print(json.dumps(result, indent=2))
    if write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def cpu_seconds(argv: list[str]) -> float:
    """Return user and system time of a command and its children [s]."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratio(taken: list[float], base: list[float]) -> float:
    """Return the median over the rounds."""
    return round(statistics.median(one / other for one, other in zip(taken, base, strict=True)), 2)
