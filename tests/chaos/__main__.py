"""Random faults in emulated runs on a real Slurm: seconds until each run has recovered, and the losses.

Needs root and Slurm's daemons. 200 faults take about an hour. The result is written to benchmarks/results/chaos.json
after every run. The same seed gives the same faults in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from tests.chaos.campaign import again, keep_failed, markdown, run_all, summary
from tests.chaos.faulty_deployment import FaultyDeployment
from tests.chaos.kinds import KINDS, switched_on
from tests.chaos.runner import to_stderr
from tests.chaos.schedule import schedule
from tests.support import temporary

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "chaos.json"


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--overlap", type=float, default=0.1, help="probability that a fault meets the one before it")
    parser.add_argument("--steps", type=int, default=150, help="of each run; faults go on in the next one")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these, also if switched off")
    parser.add_argument("--machine", default="", help="what else it does, for the record")
    parser.add_argument("--keep", type=Path, help="directory for runs with problems")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    kinds = options.kind or switched_on()
    rounds = schedule(options.seed, options.faults, kinds, options.overlap)
    memory_gb = round(psutil.virtual_memory().total / 1e9, 1)
    machine = {"cores": os.cpu_count(), "memory_gb": memory_gb, "beside": options.machine}
    head = {
        "command": again(options.seed, options.faults, options.overlap, options.kind, options.steps),
        "machine": machine,
    }
    results = []
    held = temporary.use_own()  # noqa: F841
    # an exit that also ends the cluster
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:
        deployment = FaultyDeployment(Path(directory))
        try:
            for result in run_all(deployment, options.seed, rounds, options.steps, to_stderr):
                results.append(result)
                keep_failed(deployment, result, options.keep)
                report = head | summary(results)
                options.out.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            deployment.end()
            deployment.down()
    print(markdown(report["kinds"]))
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
