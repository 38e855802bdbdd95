"""Which nodes do what: trainer nodes, the shape of the inference deployment, nodes for environments."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import Memory


class TrainNodes(Section):
    """The trainer's nodes."""

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    """GPUs used on each node. Default: all that the site says a node has."""


class RoleGroup(Section):
    """One role of an inference replica: `num_replicas` groups of `nodes_per_replica` nodes each.

    With expert parallelism a group is one set of engines that share the experts.
    """

    nodes_per_replica: PositiveInt = 1
    num_replicas: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None

    @property
    def nodes(self) -> int:
        """Nodes of this role in one inference replica."""
        return self.nodes_per_replica * self.num_replicas


class SingleNode(Section):
    """All engines on one node, behind one router."""

    type: Literal["single_node"] = "single_node"
    gpus_per_node: PositiveInt | None = None

    @property
    def num_replicas(self) -> int:
        """Always one."""
        return 1

    @property
    def nodes_per_replica(self) -> int:
        """Always one."""
        return 1


class MultiNode(Section):
    """Engines that both prefill and decode, on several nodes.

    Without expert parallelism every engine is independent; with it, a replica's engines share the experts (wide EP).
    """

    type: Literal["multi_node"] = "multi_node"
    num_replicas: PositiveInt = 1
    """Inference replicas, each behind its own router."""
    nodes_per_replica: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None


class Disaggregated(Section):
    """Separate prefill and decode engines; KV moves between them through NIXL."""

    type: Literal["disaggregated"] = "disaggregated"
    num_replicas: PositiveInt = 1
    """Inference replicas, each behind its own router."""
    prefill: RoleGroup = RoleGroup()
    decode: RoleGroup = RoleGroup()


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


class Spares(Section):
    """Nodes allocated beyond those that work: they replace nodes that fail preflight or die."""

    train: NonNegativeInt = 0
    inference: NonNegativeInt = 0
    prefill: NonNegativeInt = 0
    decode: NonNegativeInt = 0
    teacher: NonNegativeInt = 0
    environments: NonNegativeInt = 0


class Deployment(Section):
    """Which nodes do what. Totals are derived and always printed."""

    layout: Literal["het", "single", "one_node"] = "het"
    """het: one Slurm component per role. single: one allocation of like nodes, and each role has nodes of its own.
    one_node: one node that all roles share. Each role gets the GPUs that its `gpus_per_node` says."""
    colocated: bool = False
    """Trainer and engines share the same GPUs by memory, with `layout: one_node`. One GPU is enough. The engines get
    `inference.gpu_memory_utilization` of each GPU's memory, and the trainer gets the rest."""
    train: TrainNodes = TrainNodes()
    inference: Annotated[SingleNode | MultiNode | Disaggregated, Field(discriminator="type")] = SingleNode()
    environments: EnvironmentNodes | None = None
    """Nodes of their own for environments. Default: their workers run on the head node."""
    spares: Spares = Spares()

    @property
    def max_rollouts_per_node(self) -> int | None:
        """Rollouts in flight at once on a node for environments; None: as many as there are."""
        return None if self.environments is None else self.environments.max_rollouts_per_node
