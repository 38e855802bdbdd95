"""KV-cache tiers behind the GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from primeslurm.recipe.fields.section import Section


class CpuTier(Section):
    """KV cache in host memory."""

    bytes: PositiveInt
    """native: per engine, all its GPUs together. mooncake: what each inference node gives to the shared pool."""


class DiskTier(Section):
    """KV cache on disk, behind the CPU tier. Its size is bounded by the file system."""

    path: str
    """Directory on every node's own disk, for example /scratch/kv."""


class NativeOffload(Section):
    """vLLM's own offloading: one pool per engine."""

    type: Literal["native"] = "native"
    cpu: CpuTier
    disk: DiskTier | None = None


class MooncakeOffload(Section):
    """A Mooncake store: every inference node's memory (and disk) as one pool, over RDMA."""

    type: Literal["mooncake"] = "mooncake"
    cpu: CpuTier
    disk: DiskTier | None = None
    protocol: Literal["rdma", "tcp"] | None = None
    """Default: rdma on GPUs, tcp without."""
    devices: tuple[str, ...] = ()
    """HCAs to use, for example mlx5_0. Default: the site's, else what each node finds active."""


KvOffload = NativeOffload | MooncakeOffload
