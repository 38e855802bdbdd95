"""How the engines run, and where: vLLM, routers, deployment shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.base import Section
from primeslurm.recipe.syntax import EnvironmentName, OptionName


class EngineParallel(Section):
    """Parallelism of one inference replica's engines."""

    tp: PositiveInt = 1
    """GPUs per engine."""


class Router(Section):
    """One router per inference replica."""

    type: Literal["vllm-router"] = "vllm-router"
    policy: Literal["consistent_hash", "round_robin", "cache_aware", "power_of_two", "random"] = "consistent_hash"
    """consistent_hash pins a rollout to an engine by its X-Session-ID header."""


class Inference(Section):
    """The vLLM engines."""

    parallel: EngineParallel = EngineParallel()
    router: Router = Router()
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    kv_cache_bytes: PositiveInt | None = None
    """KV cache per engine in bytes. Default: what gpu_memory_utilization leaves; on CPU 256 MiB."""
    enforce_eager: bool = False
    env: dict[EnvironmentName, str] = {}
    """Environment variables of every engine."""
    prefill_env: dict[EnvironmentName, str] = {}
    decode_env: dict[EnvironmentName, str] = {}
    vllm_extra: dict[OptionName, object] = {}
    """Any other vLLM option, by its long name with underscores."""


class Group(Section):
    """Nodes that do one job."""

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    """GPUs used on each node. Default: all that the site says a node has."""


class RoleGroup(Section):
    """One role of an inference replica: `num_replicas` deployments of `nodes_per_replica` nodes each."""

    nodes_per_replica: PositiveInt = 1
    num_replicas: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None

    @property
    def nodes(self) -> int:
        """Nodes of this role in one inference replica."""
        return self.nodes_per_replica * self.num_replicas


class Aggregated(Section):
    """Engines that both prefill and decode."""

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


class Deployment(Section):
    """Which nodes do what. Totals are derived and always printed."""

    layout: Literal["het", "single"] = "het"
    """het: one Slurm component per role. single: one homogeneous allocation, roles over node ranges."""
    train: Group = Group()
    inference: Annotated[Aggregated | Disaggregated, Field(discriminator="type")] = Aggregated()
