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
# The job measures for less than a minute.
SLURM = {"time": "00:15:00", "requeue": False, "max_attempts": 1}


def calibration_plan(site: Site, partition: str | None, name: str, nodes: int, *, local: bool) -> Planned:
    """Return the Plan of a calibration run of a partition, by default the trainer's.

    With `local`, all ranks share this machine. Raises UsageError if the site cannot provide the nodes.
    """
    kind = _kind(site, partition)
    parts = nodes if local else 1
    ranks = max(1, kind.gpus // parts)
    if site.device == "cpu":  # ranks with less than a core each would wait for each other
        ranks = min(ranks, max(1, kind.cpus // parts))
    # SFT is the task whose only processes are trainer ranks. The run directory gets no recipe.
    deployment = {"layout": "single", "train": {"nodes": nodes, "gpus_per_node": ranks}}
    data = {"name": name, "task": "sft", "seq_len": 1, "model": {"path": "none"}, "slurm": SLURM}
    recipe = Recipe.model_validate({**data, "deployment": deployment})
    alone = site.model_copy(update={"nodes": {"train": kind}, "measured": {}})
    plan = derive(recipe, alone, Path(site.runs).absolute() / name, local=local)
    changed = [[_measuring(each, plan, kind) for each in node.processes] for node in plan.nodes]
    placed = [node.model_copy(update={"processes": tuple(own)}) for node, own in zip(plan.nodes, changed, strict=True)]
    return Planned(plan.model_copy(update={"nodes": tuple(placed)}), recipe)


def _kind(site: Site, partition: str | None) -> NodeKind:
    partitions = {kind.partition: kind for kind in sorted(site.nodes.values(), key=lambda kind: kind.gpus)}
    kind = partitions.get(partition) if partition else site.kind("train")
    if kind is None:
        names = sorted(partitions)
        why = f"is not in the site file, which has {', '.join(names)}" if partition else "the site has no train nodes"
        raise UsageError([Violation("--partition", partition or "", why, suggestion(partition or "", names))])
    if kind.gpus == 0:
        why = "has no GPUs, and only trainers and engines have rates that plans use"
        raise UsageError([Violation("--partition", kind.partition, why)])
    return kind


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
