"""GPU types: what the memory model and the checks need to know of them, by the name that sites use in their gres."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.recipe.site import NodeKind

GIB = 2**30
ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch's allocator reads its settings, the first one first."""

EXPANDABLE = "expandable_segments:True"
"""Freed memory is put together again for what is larger. What is registered with a network must not be in it."""


@dataclass(frozen=True)
class Gpu:
    """One type of GPU."""

    name: str
    memory_gib: float
    """Memory that CUDA reports as total."""
    sm: int
    """Compute capability, for example 90 for 9.0."""
    bf16_tflops: float
    """Dense peak."""
    nic_gbps: float
    """Network bandwidth per GPU of the usual 8-GPU node, in Gbit/s."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79.3, 80, 312, 200),
        Gpu("l40s", 44.4, 89, 362, 50),
        Gpu("h100", 79.2, 90, 989, 400),
        Gpu("h200", 139.8, 90, 989, 400),
        Gpu("b200", 178.4, 100, 2250, 400),
        Gpu("b300", 268.0, 103, 2250, 800),
    )
}
"""From the vendor's data sheets; memory as nvidia-smi shows it, which is a little less than on the sheet."""


def gpu_of(kind: NodeKind) -> Gpu | None:
    """Find the GPU of a kind of node: its `gpu` field, else the type in its gres (gpu:h200); None if unknown."""
    names = [kind.gpu] if kind.gpu else kind.gres.lower().split(":")[1:]
    return next((GPUS[name.lower()] for name in names if name.lower() in GPUS), None)


def alloc_conf(env: Mapping[str, str]) -> str:
    """Return the settings of torch's allocator in an environment; none if it has none."""
    return next((env[name] for name in ALLOC_CONF if env.get(name)), "")
