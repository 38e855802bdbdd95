"""torch.compile for the layers of a model. Each kind of layer is compiled once for all micro batches."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from primeslurm.nn.layers.scan import HeadScan
from primeslurm.nn.layers.sparse_attention import SparseAttention

# Names that the compiler gives to values that differ between micro batches: the number of documents, the longest one,
# and the keys that a shard of a row sees
_VARYING = (r".*\.cu_seq_[qk]:0", r".*\.max_[qk]", r".*\.keys\[\d+\]\[\d+\]")

# Maximum number of compiled variants: each kind of layer, with and without gradients. torch's default is 8, after which
# further layers fail.
RECOMPILE_LIMIT = 32


def configure_compiler() -> None:
    """Configure the compiler, so that it does not specialize on the shapes of the first micro batch."""
    torch.compiler.config.dynamic_sources = ",".join(_VARYING)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


def compile_layers(model: Any, config: CompileConfig, dims: ParallelDims) -> None:
    """Compile each layer, or only its feed-forward part if sparse attention or recurrences cannot be traced."""
    # Activation checkpointing wraps the compiled module, so that the recomputation runs the same code.
    parts = {name: part for name, layer in model.layers.items() if (part := _traceable(layer)) is not None}
    held = torch.nn.Module()
    held.layers = torch.nn.ModuleDict(parts)
    apply_compile(held, compile_config=config, parallel_dims=dims)


def _traceable(layer: Any) -> torch.nn.Module | None:
    if not any(isinstance(module, SparseAttention | HeadScan) for module in layer.modules()):
        return layer
    return layer.moe if layer.moe_enabled else layer.feed_forward
