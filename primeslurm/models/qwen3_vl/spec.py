"""Qwen3-VL and Qwen3-VL-MoE: Qwen3 with an encoder of images."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, EXPERTS, SWIGLU, Capabilities, Family, Traits, VisionDefaults

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
"""Sizes of the encoder, which Qwen3.5 has, too."""

FAMILY = Family(
    name="qwen3_vl",
    model_types={
        "qwen3_vl": Capabilities(cp=True, fp8=True, lora=True, images=True),
        "qwen3_vl_moe": Capabilities(ep=True, cp=True, fp8=True, lora=True, router_replay=True, images=True),
    },
    traits=Traits(qk_norm=True, expert_stacks=True, vision=VisionDefaults(QWEN_ENCODER, deepstack=(8, 16, 24))),
    renderer="qwen3-vl",
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
