"""Parallelization of decoders whose layers are not all compiled as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder

from primeslurm.nn.layers.scan import HeadScan
from primeslurm.nn.layers.sparse_attention import SparseAttention


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> Decoder:
    """Apply EP, activation checkpointing, torch.compile and FSDP, as torchtitan does for DeepSeek-V3."""
    # Context parallelism needs nothing here: layers communicate through the context that is passed to them.
    if parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable:
        compile_layers(model, compile_config, parallel_dims)
    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh([*replicate, "fsdp"]),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        edp_mesh=parallel_dims.get_optional_mesh([*replicate, "efsdp"]) if parallel_dims.ep_enabled else None,
    )
    return model


# Names that the compiler gives to values that differ between micro batches: the number of documents, the longest one,
# the keys that a shard of a row sees, and the keys of documents that share a prefix
_VARYING = (r".*\.cu_seq_[qk]:0", r".*\.max_[qk]", r".*\.keys\[\d+\]\[\d+\]", r".*\.key_index:0")
# The same for the length of rows: the second dimension of hidden states, positions and replayed experts, and all sizes
# of flex attention's masks
_LENGTHS = (
    r"L\['(x|positions)'\]$:1",
    r"L\['args'\]\[\d\]$:1",
    r".*\.replayed$:1",
    r".*\.mask_mod\..*cell_contents$",
    r".*_(indices|num_blocks)$",
    r".*\.seq_lengths\[\d\]$",
)

# Maximum number of compiled variants: each kind of layer, with and without gradients. torch's default is 8, after which
# further layers fail.
RECOMPILE_LIMIT = 32


def configure_compiler(any_length: bool) -> None:
    """Configure the compiler, so that it does not specialize on the first micro batch, or on the length of its rows."""
    torch.compiler.config.dynamic_sources = ",".join(_VARYING + (_LENGTHS if any_length else ()))
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
