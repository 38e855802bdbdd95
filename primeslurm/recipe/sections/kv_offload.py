"""KV-cache tiers behind the GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from primeslurm.recipe.fields.section import Section


class CpuTier(Section):
    """KV cache in host memory."""

    bytes: PositiveInt
    """Size in bytes. native: per engine, for all its GPUs together. mooncake: the contribution of each inference node
    to the shared pool."""


class DiskTier(Section):
    """KV cache on disk, behind the CPU tier. When it is full, the least recently used blocks are deleted."""

    path: str
    """Directory on each node's own disk, for example `/scratch/kv`."""
    bytes: PositiveInt
    """Largest size in bytes. native: per engine. mooncake: per inference node."""


class NativeOffload(Section):
    """vLLM's own KV offloading: one pool per engine."""

    type: Literal["native"] = "native"
    cpu: CpuTier
    """Host memory that each engine uses for KV cache."""
    disk: DiskTier | None = None
    """Disk tier behind host memory. Default: no disk tier."""


class MooncakeOffload(Section):
    """A Mooncake store: the memory (and disk) of all inference nodes as one pool, reached over RDMA."""

    type: Literal["mooncake"] = "mooncake"
    cpu: CpuTier
    """Host memory that each node contributes to the pool."""
    disk: DiskTier | None = None
    """Disk tier behind host memory. Default: no disk tier."""
    protocol: Literal["rdma", "tcp"] | None = None
    """Network protocol of the pool. Default: rdma on GPUs, tcp on CPUs."""
    devices: tuple[str, ...] = ()
    """Network adapters (HCAs) to use, for example `[mlx5_0]`. Default: those of the site file, else the active ones of
    each node."""


KvOffload = NativeOffload | MooncakeOffload
