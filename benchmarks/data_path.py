"""Cost of full-size rollouts on their way through the orchestrator: `python -m benchmarks data_path [PART]`.

Synthetic rollouts of 131,072 tokens with GLM-5's routed experts (75 layers, top 8, uint8) have 80 MB each. All
processes and sockets are real. Data is discarded as soon as it is not needed, so that 24 GiB of memory suffice.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "data_path.json"
# Modules `benchmarks.support.data_path_PART`, whose `measure` returns results.
PARTS = {
    "one_rollout": "what single parts of a rollout's way cost",
    "receive": "from environment workers to disk",
    "fetch": "from the orchestrator to 96 ranks of a trainer",
    "files": "the same by files",
    "restart": "what a restarted orchestrator reads to report a step",
    "again": "from an orchestrator that was restarted to the 96 ranks",
}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks data_path", description=__doc__)
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"{parts}. Default: all")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(words)
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}, but {', '.join(PARTS)}")
        module = importlib.import_module(f"benchmarks.support.data_path_{part}")
        command = f"python -m benchmarks data_path {part} --rollouts {options.rollouts} --write"
        load = round(os.getloadavg()[0], 1)
        found[part] = {
            "command": command,
            "cpus": os.cpu_count(),
            "load_average_before": load,
            **module.measure(options.rollouts),
        }
        print(json.dumps({part: found[part]}, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(found, indent=2) + "\n")
