"""Nodes and GPUs of each role: trainer, inference, environments, spares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import Memory, Port


class TrainNodes(Section):
    """The trainer's nodes."""

    nodes: PositiveInt = 1
    """Number of nodes that the trainer gets."""
    gpus_per_node: PositiveInt | None = None
    """GPUs that the trainer uses on each node. Default: all GPUs of the node."""


class RoleGroup(Section):
    """The nodes of one role in an inference replica.

    They form `num_replicas` groups of `nodes_per_replica` nodes. With expert parallelism, the engines of a group share
    the experts.
    """

    nodes_per_replica: PositiveInt = 1
    """Nodes in one group of this role."""
    num_replicas: PositiveInt = 1
    """Number of groups of engines of this role in one inference replica. All groups share the replica's router, while
    `deployment.inference.num_replicas` counts inference replicas, each with its own router."""
    gpus_per_node: PositiveInt | None = None
    """GPUs that this role uses on each node. Default: all GPUs of the node."""

    @property
    def nodes(self) -> int:
        """Nodes of this role in one inference replica."""
        return self.nodes_per_replica * self.num_replicas


class FixedPorts(Section):
    """Ports that routers and engines must use, for sites whose firewall or tools expect certain ports."""

    router_port: Port | None = None
    """Port of each replica's router, for example `8000`. If another program of the node has it, the run does not start
    there. Default: a free port."""
    backend_port: Port | None = None
    """Port of the first engine of each node, for example `8100`. Other engines of the node use the ports after it, and
    with `layout: one_node` decode engines those after prefill engines. Default: free ports."""


class SingleNode(FixedPorts):
    """All engines on one node, behind one router."""

    type: Literal["single_node"] = "single_node"
    gpus_per_node: PositiveInt | None = None
    """GPUs that the engines use on the node. Default: all GPUs of the node."""

    @property
    def num_replicas(self) -> int:
        """1, as for a `multi_node` deployment with one replica."""
        return 1

    @property
    def nodes_per_replica(self) -> int:
        """1, as for a `multi_node` deployment on one node."""
        return 1


class MultiNode(FixedPorts):
    """Engines that both prefill and decode, on one or several nodes.

    Without expert parallelism the engines are independent. With it, the engines of a replica share the experts (wide
    EP).
    """

    type: Literal["multi_node"] = "multi_node"
    num_replicas: PositiveInt = 1
    """Number of inference replicas. Each has its own router."""
    nodes_per_replica: PositiveInt = 1
    """Nodes of one inference replica."""
    gpus_per_node: PositiveInt | None = None
    """GPUs that the engines use on each node. Default: all GPUs of the node."""


class Disaggregated(FixedPorts):
    """Separate prefill and decode engines (P/D). NIXL moves the KV cache from prefill to decode engines."""

    type: Literal["disaggregated"] = "disaggregated"
    num_replicas: PositiveInt = 1
    """Number of inference replicas. Each has its own router."""
    prefill: RoleGroup = RoleGroup()
    """Groups of prefill nodes in each inference replica."""
    decode: RoleGroup = RoleGroup()
    """Groups of decode nodes in each inference replica."""


class EnvironmentNodes(Section):
    """CPU nodes for environment workers, their tools and their sandboxes.

    Workers of all environments are distributed over these nodes in turn. If a node is lost, its rollouts are lost; its
    workers move to a spare (`deployment.spares.environments`) or to the other nodes.
    """

    nodes: PositiveInt
    """Number of nodes for environment workers."""
    cpus: PositiveInt | None = None
    """CPU cores that the job asks for on each node. Default: all cores of the node."""
    memory: Memory | None = None
    """Memory that the job asks for on each node, for example `500G`. Default: the memory in the site file."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPU cores that one worker needs together with all programs that its rollouts start."""
    memory_per_worker: Memory = "1G"
    """Memory that one worker needs together with all programs that its rollouts start, for example `128G`."""
    max_rollouts_per_node: PositiveInt | None = None
    """Largest number of rollouts that run at once on one node; further rollouts wait. Default: no limit."""


class Spares(Section):
    """Extra nodes of the job. A spare replaces a node that fails its preflight or is lost."""

    train: NonNegativeInt = 0
    """Spare nodes for the trainer."""
    inference: NonNegativeInt = 0
    """Spare nodes for engines that both prefill and decode."""
    prefill: NonNegativeInt = 0
    """Spare nodes for prefill engines."""
    decode: NonNegativeInt = 0
    """Spare nodes for decode engines."""
    teacher: NonNegativeInt = 0
    """Spare nodes for the teacher's engines."""
    environments: NonNegativeInt = 0
    """Spare nodes for environment workers."""


class Deployment(Section):
    """Number of nodes and GPUs of each role. `plan` and `check` print the totals."""

    layout: Literal["het", "single", "one_node"] = "het"
    """het: one Slurm component per role. single: one allocation of equal nodes, and each role has its own nodes.
    one_node: one node that all roles share. Each role gets `gpus_per_node` of its GPUs."""
    colocated: bool = False
    """Let trainer and engines share the same GPUs, with `layout: one_node`. One GPU is enough. The engines get the
    fraction `inference.gpu_memory_utilization` of each GPU's memory, and the trainer gets the rest."""
    train: TrainNodes = TrainNodes()
    """Nodes and GPUs of the trainer."""
    inference: Annotated[SingleNode | MultiNode | Disaggregated, Field(discriminator="type")] = SingleNode()
    """Nodes and GPUs of the engines. Default: `{type: single_node}`."""
    environments: EnvironmentNodes | None = None
    """CPU nodes for environment workers. Default: workers run on the head node."""
    spares: Spares = Spares()
    """Extra nodes that replace failed ones, per role."""

    @property
    def max_rollouts_per_node(self) -> int | None:
        """Largest number of rollouts in flight on one environment node; None for no limit."""
        return None if self.environments is None else self.environments.max_rollouts_per_node
