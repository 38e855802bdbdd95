"""A Plan whose engines, stores, trainer ranks and environments are replaced by light stand-ins; all else stays."""

from __future__ import annotations

import math

from primeslurm.plan.model import Plan, Process, Role

STAND_INS: dict[Role, str] = {
    "engine": "primeslurm.testbed.emulated.engine",
    "prefill": "primeslurm.testbed.emulated.engine",
    "decode": "primeslurm.testbed.emulated.engine",
    "trainer": "primeslurm.testbed.emulated.trainer",
    "environment": "primeslurm.testbed.emulated.environment",
    "store": "primeslurm.testbed.emulated.store",
    "teacher": "primeslurm.testbed.emulated.engine",
}
"""Module that is started in place of a role's own, with the same arguments."""

NODE_MIB = 30
"""Memory of a node of an embedded cluster: its agent (28, without its plan), slurmd, the job's steps."""
PLANNED_KIB = 5
"""Memory that a process takes in the plan of each agent."""
PROCESS_MIB: dict[Role, int] = {"trainer": 7, "router": 50, "orchestrator": 70, "environment": 45}
"""Memory of a stand-in, or of what runs as it is; Python's share that none of them has for itself is not in it."""
USUAL_MIB = 16
"""Of an engine, a teacher, a store."""
MERGED_SHARE = 0.5
"""What is left of all that where the kernel merges equal pages, which takes it a while."""


def memory_mib(plan: Plan, *, merged: bool = False) -> int:
    """Estimate what all of an emulated run takes on the one machine that it runs on, in MiB.

    Args:
        plan: of the run.
        merged: the kernel merges equal pages of its processes.
    """
    processes = [PROCESS_MIB.get(process.role, USUAL_MIB) for process in plan.processes()]
    agent = NODE_MIB + PLANNED_KIB * len(processes) / 1024
    return math.ceil((plan.allocated * agent + sum(processes)) * (MERGED_SHARE if merged else 1.0))


def emulate(plan: Plan) -> Plan:
    """Put stand-ins into a Plan: only the modules of some commands differ, and the Plan says so."""
    nodes = tuple(
        node.model_copy(update={"processes": tuple(_replaced(process) for process in node.processes)})
        for node in plan.nodes
    )
    return plan.model_copy(update={"nodes": nodes, "emulated": True})


def _replaced(process: Process) -> Process:
    module = STAND_INS.get(process.role)
    if module is None:
        return process
    place = process.argv.index("-m") + 1
    argv = (*process.argv[:place], module, *process.argv[place + 1 :])
    return process.model_copy(update={"argv": argv, "imports": (module,) if process.imports else ()})
