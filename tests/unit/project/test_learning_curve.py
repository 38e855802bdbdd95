"""The learning curve and the README's numbers are those of the recorded run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_arithmetic_h200x2.json"


def test_the_figure_is_current() -> None:
    argv = [sys.executable, "scripts/learning_curve.py", "--check"]
    done = subprocess.run(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_says_what_was_measured() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    results = json.loads(RESULTS.read_bytes())
    first, *_, last = (row["solved"] for row in results["held_out"])
    assert f"from {first:.0%} to {last:.0%} in {len(results['steps'])} steps".replace("%", " %") in text
    seconds = statistics.mean(row["seconds"] for row in results["steps"][1:])
    assert f"a step takes {seconds:.1f} seconds on average" in text


def test_the_readme_says_what_one_gpu_reached() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    results = json.loads(RESULTS.with_name("smollm2_arithmetic_h200x1.json").read_bytes())
    assert f"it reaches {results['held_out'][-1]['solved']:.0%}".replace("%", " %") in text
