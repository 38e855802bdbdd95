"""The numbers of the README are those of the recorded runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_arithmetic_h200x2.json"


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
