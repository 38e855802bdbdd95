"""Parallelization of decoders whose layers are not all compiled as a whole."""

from __future__ import annotations

from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder

from primeslurm.nn.layers.compiled import compile_layers


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
