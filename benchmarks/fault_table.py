"""What each fault costs a run: the faults of tests/emulated/faults.py, one after the other on one small deployment.

Usage: python -m benchmarks.fault_table [NAME ...]     Needs root and Slurm's daemons; takes about ten minutes.
Result: benchmarks/results/fault_table.json. Names given replace their rows in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.emulated.faults import FAULTS, suffer
from tests.support.emulation import Deployment

RESULT = Path(__file__).parent / "results" / "fault_table.json"


def main() -> None:
    """Measure, and write the table after every row."""
    wanted = [fault for fault in FAULTS if not sys.argv[1:] or fault.name in sys.argv[1:]]
    known = json.loads(RESULT.read_text())["faults"] if RESULT.is_file() and sys.argv[1:] else []
    rows: dict[str, dict[str, Any]] = {row["fault"]: row for row in known}
    with tempfile.TemporaryDirectory(prefix="ps-faults-", dir="/tmp") as directory:
        deployment = Deployment(Path(directory))
        try:
            for fault in wanted:
                rows[fault.name] = suffer(deployment, fault).row() | {"load_1m": round(os.getloadavg()[0], 1)}
                print(json.dumps(rows[fault.name]), flush=True)
                table = [rows[name] for name in (f.name for f in FAULTS) if name in rows]
                RESULT.write_text(json.dumps({"cores": os.cpu_count(), "faults": table}, indent=2) + "\n")
        finally:
            deployment.down()


if __name__ == "__main__":
    main()
