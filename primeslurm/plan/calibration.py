"""The Plan of a calibration: trainer ranks that measure a partition's rates instead of training. Pure."""

from __future__ import annotations

from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.planner import Planned, derive
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.recipe.site import NodeKind

MODULE = "primeslurm.trainer.calibration"
# Time limit of the job. It measures for less than a minute.
TIME = "00:15:00"
FIELD = "--partition"


def calibrated_kind(site: Site, partition: str | None) -> NodeKind:
    """Return the nodes to measure: those of a partition, or those of the trainer. Raises UsageError."""
    if partition is None:
        kind = site.kind("train")
        why, fix = "names no nodes for trainers", "name the partition to measure: --partition P"
    else:
        kind = next((kind for kind in site.nodes.values() if kind.partition == partition), None)
        partitions = sorted({kind.partition for kind in site.nodes.values()})
        why, fix = f"is not in the site file, which has {', '.join(partitions)}", suggestion(partition, partitions)
    if kind is None:
        raise UsageError([Violation(FIELD, partition or "", why, fix)])
    if kind.gpus == 0:
        why = "has no GPUs, and only trainers and engines have rates that plans use"
        raise UsageError([Violation(FIELD, kind.partition, why)])
    return kind


def calibration_plan(site: Site, kind: NodeKind, name: str, nodes: int, *, local: bool) -> Planned:
    """Return the Plan of a calibration run. Raises UsageError if the site cannot provide the nodes.

    Args:
        local: all ranks share this machine.
    """
    # Ranks on CPUs would only wait for each other if they had less than a core each.
    ranks = max(1, (kind.gpus // nodes if local else kind.gpus))
    ranks = min(ranks, max(1, kind.cpus // (nodes if local else 1))) if site.device == "cpu" else ranks
    recipe = Recipe.model_validate(
        {
            "name": name,
            "task": "sft",  # the task whose only processes are trainer ranks
            "seq_len": 1,
            "model": {"path": "none"},
            "deployment": {"layout": "single", "train": {"nodes": nodes, "gpus_per_node": ranks}},
            "slurm": {"time": TIME, "requeue": False, "max_attempts": 1},
        }
    )
    alone = site.model_copy(update={"nodes": {"train": kind}})
    plan = derive(recipe, alone, Path(site.runs).absolute() / name, local=local)
    placed = tuple(
        node.model_copy(update={"processes": tuple(_measuring(each, plan, kind) for each in node.processes)})
        for node in plan.nodes
    )
    return Planned(plan.model_copy(update={"nodes": placed}), recipe)


def _measuring(process: Process, plan: Plan, kind: NodeKind) -> Process:
    argv = (
        "${python}",
        "-m",
        MODULE,
        "--run-dir",
        "${run_dir}",
        "--device",
        plan.device,
        "--partition",
        kind.partition,
    )
    # torch looks for GPUs when it is imported, before the module has read its arguments.
    env = process.env | ({"CUDA_VISIBLE_DEVICES": ""} if plan.device == "cpu" else {})
    return process.model_copy(update={"argv": argv, "env": env, "max_restarts": 0})
