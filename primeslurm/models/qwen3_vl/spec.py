"""Family record of Qwen3-VL and Qwen3-VL-MoE: Qwen3 with a vision encoder."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, DENSE, EXPERTS, MOE, SWIGLU, Family, Traits, VisionDefaults

# Default sizes of the vision encoder. Qwen3.5 has the same.
QWEN_ENCODER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
}

FAMILY = Family(
    name="qwen3_vl",
    model_types={
        "qwen3_vl": replace(DENSE, prefix_sharing=True, fp8_checkpoint=False, images=True),
        "qwen3_vl_moe": replace(MOE, prefix_sharing=True, fp8_checkpoint=False, images=True),
    },
    traits=Traits(qk_norm=True, expert_stacks=True, vision=VisionDefaults(QWEN_ENCODER, deepstack=(8, 16, 24))),
    renderer="qwen3-vl",
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
