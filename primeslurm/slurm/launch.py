"""What a job's output tells of tasks that could not be started, and which nodes the job has. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from primeslurm.plan.model import Plan
from primeslurm.slurm.nodelists import expand

MARK = "primeslurm: start"
"""Begins a line of the job's output, before the number of times that Slurm has requeued the job: what follows belongs
to that start."""
_LAUNCH = re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.MULTILINE)
_EXIT = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (Exited with exit code \d+)$", re.MULTILINE)


def restarts(environ: Mapping[str, str]) -> int:
    """How often Slurm has requeued the job that this process belongs to."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def node_names(plan: Plan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the job's nodes, in order of rank; empty outside a job of Slurm."""
    single = len(plan.groups) == 1
    names = ("SLURM_JOB_NODELIST" if single else f"SLURM_JOB_NODELIST_HET_GROUP_{g.index}" for g in plan.groups)
    found = [name for variable in names for name in expand(environ.get(variable, ""))]
    return tuple(found) if len(found) == plan.allocated else ()


def launch_failures(output: str, start: int) -> dict[str, str]:
    """Nodes that srun could not reach in the newest start of the job, with its reason. It then ends all other tasks."""
    return dict(_LAUNCH.findall(_since(output, start)))


def early_exits(output: str, start: int) -> dict[str, str]:
    """Nodes whose task has ended badly by itself in the newest start of the job, with how."""
    found = _EXIT.findall(_since(output, start))
    return {name: how for hostlist, how in found for name in expand(hostlist)}


def _since(output: str, start: int) -> str:
    _, mark, rest = output.rpartition(f"{MARK} {start}\n")
    return rest if mark else ""
