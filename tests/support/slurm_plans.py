"""Small plans built by hand, for tests that need no recipe."""

from __future__ import annotations

import sys
from pathlib import Path

from primeslurm.plan.model import HetGroup, JobOptions, Node, NodeRole, Plan, Totals

ROLES: dict[str, NodeRole] = {"control": "control", "train": "train", "prefill": "prefill", "decode": "decode"}


def group(index: int, name: str, nodes: int = 1, *, gpus: int = 0, **options: object) -> HetGroup:
    """Return a component in partition gpu, or cpu without GPUs."""
    values: dict[str, object] = {
        "partition": "gpu" if gpus else "cpu",
        "gres": f"gpu:{gpus}" if gpus else None,
        "cpus_per_task": 2,
    }
    return HetGroup(index=index, name=name, nodes=nodes, **(values | options))


def plan(run_dir: Path | str, *groups: HetGroup, env: dict[str, str] | None = None, **job: object) -> Plan:
    """Return a plan of these components whose nodes run nothing."""
    nodes = []
    for component in groups:
        role = ROLES.get(component.name, "train")
        for i in range(component.nodes):
            nodes.append(Node(index=len(nodes), group=component.index, role=role, index_in_group=i))
    gpus = sum(g.nodes * int(g.gres.rpartition(":")[2]) for g in groups if g.gres)
    return Plan(
        schema=1,
        run="demo",
        run_dir=str(run_dir),
        task="rl",
        layout="het" if len(groups) > 1 else "single",
        executor="slurm",
        device="cpu",
        python=sys.executable,
        job=JobOptions(**({"name": "demo", "time": "01:00:00"} | job)),
        groups=groups,
        nodes=tuple(nodes),
        replicas=(),
        totals=Totals(nodes=len(nodes), gpus=gpus, trainer_gpus=0, engines=0, inference_nodes=0, routers=0),
        env=env or {},
        stall_timeout_s=60,
        max_attempts=5,
    )
