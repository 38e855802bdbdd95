"""Environment workers on nodes: those of their own, over which they are dealt out in turn, or else the head."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.plan.commands.processes import environment_command
from primeslurm.plan.model import Beats
from primeslurm.plan.placement.node_builder import NodeBuilder
from primeslurm.recipe import Recipe, Site


def place_environments(recipe: Recipe, site: Site, builders: Sequence[NodeBuilder]) -> None:
    """Put every environment's workers on nodes.

    Workers of one environment are on as many nodes as there are: they and what their rollouts start load all nodes
    alike, and the loss of a node leaves each environment its share.

    Args:
        recipe: of the run.
        site: where it is to run.
        builders: all nodes, the head first; those of role environments are filled, or the head if there are none.
    """
    nodes = [builder for builder in builders if builder.role == "environments"] or builders[:1]
    kind = site.kind(nodes[0].role)
    workers = [(each.label, worker) for each in recipe.all_environments for worker in range(each.workers)]
    for number, (label, worker) in enumerate(workers):
        nodes[number % len(nodes)].add(
            f"environment-{label}-{worker}",
            "environment",
            environment_command(label, worker, kind.scratch if kind else None),
            beats=Beats(hang_timeout_s=recipe.orchestrator.worker_hang_timeout_s),
            after=("orchestrator",),
        )
