"""What torch.compile compiles of a model, and for which shapes: layers are compiled once for all micro batches."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from primeslurm.nn.layers.scan import HeadScan
from primeslurm.nn.layers.sparse_attention import SparseAttention

_VARYING = (r".*\.cu_seq_[qk]:0", r".*\.max_[qk]", r".*\.keys\[\d+\]\[\d+\]")
"""Where compiled code finds what differs between micro batches, as the compiler calls it: how many documents there are,
how long the longest is, and which keys a piece of a row sees."""

KINDS = 32
"""Of layers that a model may have: each is compiled by itself, for inputs that have a gradient and for others. After
torch's own 8, a layer more would be an error."""


def prepare() -> None:
    """Set up the compiler, before it compiles anything: nothing is compiled first for the first micro batch alone."""
    torch.compiler.config.dynamic_sources = ",".join(_VARYING)
    torch._dynamo.config.recompile_limit = KINDS


def layers(model: Any, config: CompileConfig, dims: ParallelDims) -> None:
    """Compile each layer. Of one that mixes tokens by what cannot be traced, what follows that, experts or not.

    Those are sparse attention and recurrences: without tracing, their kernels run. Checkpointing is around what is
    compiled, and computes both times by the same code.
    """
    parts = {name: part for name, layer in model.layers.items() if (part := _traceable(layer)) is not None}
    held = torch.nn.Module()
    held.layers = torch.nn.ModuleDict(parts)
    apply_compile(held, compile_config=config, parallel_dims=dims)


def _traceable(layer: Any) -> torch.nn.Module | None:
    if not any(isinstance(module, SparseAttention | HeadScan) for module in layer.modules()):
        return layer
    return layer.moe if layer.moe_enabled else layer.feed_forward
