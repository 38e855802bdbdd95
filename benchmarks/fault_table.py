"""Cost of each fault of tests/emulated to a run, one after another on one small deployment.

Needs root and Slurm's daemons, and about ten minutes. It runs the tests of the faults, and writes their recorded costs
to benchmarks/results/fault_table.json. Given names replace only their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "fault_table.json"
TESTS = "tests/emulated/test_faults.py"


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fault_table", description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults; default: all")
    names = parser.parse_args(words).names
    rows: dict[str, dict[str, Any]] = {}
    if names and RESULT.is_file():
        rows = {row["fault"]: row for row in json.loads(RESULT.read_text())["faults"]}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        tests = [f"{TESTS}::test_fault[{name}]" for name in names] or [TESTS]
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            *tests,
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ]
        code = subprocess.call(argv, cwd=RESULT.parents[2])
        found = recorded(report) if report.is_file() else []
    if not found:
        sys.exit(code)  # pytest has printed the reason
    rows |= {row["fault"]: row for row in found}
    RESULT.write_text(json.dumps({"cores": os.cpu_count(), "faults": list(rows.values())}, indent=2) + "\n")
    print(json.dumps(list(rows.values()), indent=2))
    sys.exit(code)


def recorded(report: Path) -> list[dict[str, Any]]:
    """Return the `cost` that the tests recorded."""
    costs = xml.parse(report).iterfind(".//property[@name='cost']")
    return [json.loads(cost.attrib["value"]) for cost in costs]
