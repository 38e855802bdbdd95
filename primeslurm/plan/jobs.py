"""What Slurm is asked for: components, options of the batch job, and the environment of everything in it."""

from __future__ import annotations

from primeslurm.plan.model import HetGroup, JobOptions
from primeslurm.plan.needs import Need
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.scheduling import Component


def groups(recipe: Recipe, needs: list[Need]) -> tuple[HetGroup, ...]:
    """The job's components in order: one per role, or one for all of them (`layout: single`)."""
    if recipe.deployment.layout == "single":
        widest = max(needs, key=lambda need: need.gpus)
        nodes, spares = sum(need.nodes for need in needs), sum(need.spares for need in needs)
        return (_group(0, "all", nodes, spares, widest, recipe.slurm.train),)
    return tuple(
        _group(index, need.role, need.nodes, need.spares, need, getattr(recipe.slurm, need.role))
        for index, need in enumerate(needs)
    )


def _group(index: int, name: str, nodes: int, spares: int, need: Need, component: Component) -> HetGroup:
    kind = need.kind
    return HetGroup(
        index=index,
        name=name,
        nodes=nodes + spares,
        spares=spares,
        partition=component.partition or kind.partition,
        gres=f"{kind.gres}:{need.gpus}" if need.gpus else None,
        cpus_per_task=component.cpus_per_task or kind.cpus,
        mem=component.mem or kind.mem,
        constraint=component.constraint,
    )


def job_options(recipe: Recipe, site: Site) -> JobOptions:
    """Options of the batch job as a whole; what the recipe leaves open comes from the site."""
    slurm = recipe.slurm
    return JobOptions(
        name=recipe.name,
        time=slurm.time,
        account=slurm.account or site.account,
        qos=slurm.qos or site.qos,
        reservation=slurm.reservation,
        comment=slurm.comment,
        exclude=slurm.exclude,
        requeue=slurm.requeue,
        signal_s=slurm.checkpoint_signal_s,
        modules=site.modules,
        prologue=site.prologue,
    )


def environment(site: Site) -> dict[str, str]:
    """Environment of every process on every node."""
    env = {
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": "${tmp}",
        "GLOO_SOCKET_IFNAME": "${interface}",
        "NCCL_SOCKET_IFNAME": "${interface}",
        "NCCL_IB_HCA": "${nccl_hcas}",
    }
    if site.device == "cpu":
        # One thread a process: an emulated cluster puts many "nodes" on few cores.
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CONFIG_ROOT": "${tmp}/vllm"}
    return env | site.env
