"""GPU types by the name that sites use in their gres."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.recipe.site import NodeKind

GIB = 2**30
# Variables with the settings of torch's allocator, in order of precedence
ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Let torch's allocator join freed segments. It moves memory, so memory registered with a NIC must not be in it.
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Gpu:
    """One type of GPU."""

    name: str
    memory_gib: float  # total memory that CUDA reports
    sm: int  # compute capability, for example 90 for 9.0
    bf16_tflops: float  # dense peak
    memory_tb_s: float  # bandwidth of its memory
    nic_gbps: float  # network bandwidth per GPU of a typical 8-GPU node [Gbit/s]
    update_bytes_s: float = 4e12  # rate of AdamW in its memory, measured on an H200
    link_bytes_s: float = math.inf  # measured rate between the GPUs of a node; inf: not measured
    host_bytes_s: float = 4.7e10  # rate each way of a GPU and its host with traffic both ways, measured on an H200
    fp8_speedup: float = 1.95  # of products with weights, fitted


# From the vendor's data sheets. Memory is what nvidia-smi shows, slightly less than on the sheet.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79.3, 80, 312, 2.0, 200),
        Gpu("l40s", 44.4, 89, 362, 0.86, 50),
        Gpu("h100", 79.2, 90, 989, 3.35, 400),
        Gpu("h200", 139.8, 90, 989, 4.8, 400),
        Gpu("b200", 178.4, 100, 2250, 8.0, 400),
        Gpu("b300", 268.0, 103, 2250, 8.0, 800),
    )
}


def gpu_of(kind: NodeKind) -> Gpu | None:
    """Return the GPU of a kind of node: its `gpu` field, else the type in its gres (gpu:h200); None if unknown."""
    names = [kind.gpu] if kind.gpu else kind.gres.lower().split(":")[1:]
    return next((GPUS[name.lower()] for name in names if name.lower() in GPUS), None)


def alloc_conf(env: Mapping[str, str]) -> str:
    """Return the settings of torch's allocator in an environment; empty if there are none."""
    return next((env[name] for name in ALLOC_CONF if env.get(name)), "")
