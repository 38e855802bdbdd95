"""Cost of evaluations during training: staleness and step time, with and without them.

Runs the demo's recipe on CPUs, without Slurm, in pairs: one run trains alone, the other is also evaluated every few
steps. Pairs alternate, so that other load on the machine affects both. Steps during an evaluation are also compared
with other steps of the same run. Results come from the records of the runs. The final evaluation follows the last step,
and is not part of any step time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primeslurm.records.evaluation import evaluations
from primeslurm.records.metrics import Row
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import dropped_rollouts, rows

RESULT = Path(__file__).resolve().parent / "results" / "evaluation.json"
RECIPE = "recipes/reverse_text_single.yaml"
# First steps, whose time includes the start of the engines.
SKIPPED = 1


def settings(options: argparse.Namespace, *, evaluated: bool) -> dict[str, Any]:
    """Return the recipe settings of one of the two cases."""
    common: dict[str, Any] = {"max_steps": options.steps, "model.path": str(options.model.resolve())}
    if not evaluated:
        return common
    environment = {
        "id": "reverse-text",
        "name": "held-out",
        "args": {"seed": 7},
        "examples": options.examples,
        "samples": options.samples,
        "sampling": {"max_tokens": 16},
    }
    return {**common, "evaluation": {"interval": options.interval, "environments": [environment]}}


def run(name: str, changes: Mapping[str, Any]) -> RunDirectory:
    """Run to the end. Raise CalledProcessError if it fails."""
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    submit = ["-m", "primeslurm", "submit", RECIPE, "--local", "--wait", "--name", name, *words]
    subprocess.run([sys.executable, *submit], check=True)
    return RunDirectory(Path("runs") / name)


def figures(run: RunDirectory) -> dict[str, Any]:
    """Return the results of one run."""
    steps: Sequence[Row] = rows(run.path)
    during = [record for record in evaluations(run.path) if record.step < len(steps)]
    spans = [(record.time - record.seconds, record.time) for record in during]
    beside = [row for row in steps[SKIPPED:] if any(_overlap(row, *span) for span in spans)]
    alone = [row for row in steps[SKIPPED:] if row not in beside]
    return {
        "step_seconds": _step_seconds(steps[SKIPPED:]),
        "step_seconds_beside_evaluation": _step_seconds(beside),
        "step_seconds_alone": _step_seconds(alone),
        "staleness_mean": _round(statistics.fmean(row["staleness/mean"] for row in steps)),
        "staleness_max": max(row["staleness/max"] for row in steps),
        "dropped_stale": dropped_rollouts(run.latest()),
        "mixed_version": sum(row["rollouts/mixed_version"] for row in steps),
        "sampled_tokens_per_s": _round(statistics.fmean(row["throughput/tokens_per_s"] for row in steps[SKIPPED:])),
        "evaluations": [
            {"step": record.step, "versions": [record.oldest_version, record.newest_version]}
            | {"seconds": _round(record.seconds), "samples": sum(r.examples * r.samples for r in record.results)}
            for record in during
        ],
    }


def _overlap(row: Row, begin: float, end: float) -> bool:
    """Return whether a step overlaps a time span."""
    return row["time"] > begin and row["time"] - row["throughput/step_seconds"] < end


def _step_seconds(steps: Sequence[Row]) -> dict[str, float]:
    values = [row["throughput/step_seconds"] for row in steps]
    if not values:
        return {"steps": 0}
    mean, median = statistics.fmean(values), statistics.median(values)
    return {"steps": len(values), "mean": _round(mean), "median": _round(median)}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks evaluation", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path(".primeslurm/reverse-text/model"), help="of ./just warm-start"
    )
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--interval", type=int, default=4)
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args(words)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks evaluation", *words]),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "recipe": RECIPE,
        "pairs": [],
    }
    stamp = time.strftime("%H%M%S")
    for pair in range(options.pairs):
        found: dict[str, Any] = {"load_1m": _round(os.getloadavg()[0])}
        for case, evaluated in (("without", False), ("with", True)):
            name = f"evaluation-{case}-{stamp}-{pair}"
            found[case] = figures(run(name, settings(options, evaluated=evaluated)))
        result["pairs"].append(found)
        print(json.dumps(found), flush=True)
        if options.write:
            RESULT.write_text(json.dumps(result, indent=2) + "\n")
