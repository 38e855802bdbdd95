"""Small plans of simple processes, for tests of the agents that run them."""

from __future__ import annotations

import sys
from pathlib import Path

from primeslurm.plan.model import HetGroup, JobOptions, Node, Plan, Process, Replica, Totals

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def python(code: str, *args: str) -> tuple[str, ...]:
    """Return the argv of a Python one-liner."""
    return (sys.executable, "-c", code, *args)


SLEEP = python("import time; time.sleep(600)")


def process(name: str, node: int, argv: tuple[str, ...] = SLEEP, role: str = "engine", **options: object) -> Process:
    """Return a process of a plan, by default one that sleeps. The end of a trainer ends its attempt."""
    restart = "attempt" if role == "trainer" else "in_place"
    fields = {"name": name, "role": role, "node": node, "argv": argv, "restart": restart}
    return Process.model_validate(fields | {"log": f"logs/{role}/{name}.log"} | options)


def plan_of(
    run_dir: Path,
    *nodes: tuple[Process, ...],
    max_attempts: int = 3,
    stall_timeout_s: int = 600,
    spares: int = 0,
    node_silent_s: int = 90,
    node_start_s: int = 300,
    replicas: tuple[Replica, ...] = (),
) -> Plan:
    """Return a local plan whose nodes run the given processes, with `spares` spare nodes."""
    allocated = len(nodes) + spares
    return Plan(
        schema=1,
        run=run_dir.name,
        run_dir=str(run_dir),
        task="rl",
        layout="het",
        executor="local",
        device="cpu",
        python=sys.executable,
        job=JobOptions(name=run_dir.name, time="00:10:00", signal_s=40),
        groups=(
            HetGroup(index=0, name="all", nodes=allocated, spares=spares, partition="p", gres=None, cpus_per_task=1),
        ),
        nodes=tuple(
            Node(index=i, group=0, role="control", index_in_group=i, processes=processes)
            for i, processes in enumerate(nodes)
        ),
        replicas=replicas,
        totals=Totals(nodes=allocated, gpus=0, trainer_gpus=0, engines=0, inference_nodes=0, routers=0),
        env={"TMPDIR": "${tmp}"},
        stall_timeout_s=stall_timeout_s,
        max_attempts=max_attempts,
        node_silent_s=node_silent_s,
        node_start_s=node_start_s,
    )
