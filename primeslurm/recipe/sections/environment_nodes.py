"""Nodes for environments: where rollouts run their tools and sandboxes when the head node is too small for them."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import Memory


class EnvironmentNodes(Section):
    """Nodes without GPUs, over which the workers of all environments are dealt out in turn.

    What rollouts start (tools, sandboxes) runs beside their worker. A node that is lost costs the rollouts that it ran:
    its workers move to a spare (`deployment.spares.environments`), or to the other nodes.
    """

    nodes: PositiveInt
    cpus: PositiveInt | None = None
    """CPU cores of each node that the job gets. Default: all that the site says a node has."""
    memory: Memory | None = None
    """Memory of each node that the job gets, for example 500G. Default: what the site says."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPU cores that a worker takes with all that its rollouts start. A node must have as many for each of its
    workers."""
    memory_per_worker: Memory = "1G"
    """The same of memory."""
    max_rollouts_per_node: PositiveInt | None = None
    """Most rollouts at once on one node; more wait until one ends. Default: no bound."""
