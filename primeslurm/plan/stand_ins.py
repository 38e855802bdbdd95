"""Replace engines, stores, trainer ranks and environments of a Plan by lightweight emulated processes."""

from __future__ import annotations

import math

from primeslurm.plan.model import Plan, Process, Role

# Module that replaces the role's own module. It takes the same arguments.
STAND_INS: dict[Role, str] = {
    "engine": "primeslurm.testbed.emulated.engine",
    "prefill": "primeslurm.testbed.emulated.engine",
    "decode": "primeslurm.testbed.emulated.engine",
    "trainer": "primeslurm.testbed.emulated.trainer",
    "environment": "primeslurm.testbed.emulated.environment",
    "store": "primeslurm.testbed.emulated.store",
    "teacher": "primeslurm.testbed.emulated.engine",
}

# Memory of a node of an embedded cluster [MiB]: agent (28, without the plan), slurmd and job steps
NODE_MIB = 30
# Memory per process of the plan that each agent holds [KiB]
PLANNED_KIB = 8
# Memory of an emulated or real process by role [MiB], without the pages of Python that all processes share
PROCESS_MIB: dict[Role, int] = {"trainer": 7, "router": 50, "orchestrator": 70, "environment": 45}
# Memory of an emulated engine, teacher or store [MiB]
USUAL_MIB = 16
# Memory that remains after the kernel has merged equal pages (KSM). Merging takes a while.
MERGED_SHARE = 0.5


def memory_mib(plan: Plan, *, merged: bool = False) -> int:
    """Estimate the memory of an emulated run on its one machine [MiB]. `merged`: the kernel merges equal pages."""
    processes = [PROCESS_MIB.get(process.role, USUAL_MIB) for process in plan.processes()]
    agent = NODE_MIB + PLANNED_KIB * len(processes) / 1024
    return math.ceil((plan.allocated * agent + sum(processes)) * (MERGED_SHARE if merged else 1.0))


def emulate(plan: Plan) -> Plan:
    """Return a Plan with the modules of `STAND_INS`. Everything else stays the same."""
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
