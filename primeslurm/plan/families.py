"""What the trainer can do with each model family. Known without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What the trainer can do with a family. Every True has a test."""

    ep: bool = False
    """Experts spread over ranks."""
    cp: bool = False
    """Sequences split over ranks."""
    fp8: bool = False
    """Block-scale FP8 matrix products."""
    lora: bool = False
    """Adapters on linear layers, and on experts that are SwiGLU without biases."""
    router_replay: bool = False
    head_chunks: bool = True
    """Logits in chunks of tokens."""
    fp8_checkpoint: bool = False
    """Checkpoints in E4M3 with one scale for each block of 128 x 128 weights load."""
    images: bool = False
    """A vision encoder beside the language model."""
    offload: bool = True
    """Activations, or masters and optimizer state, in host memory."""


FAMILIES: dict[str, Capabilities] = {
    "afmoe": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, fp8=True, lora=True),
    "deepseek_v3": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, fp8=True, lora=True),
    "glm4_moe": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, fp8=True, lora=True),
    "glm_moe_dsa": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, lora=True, fp8=True),
    "gpt_oss": Capabilities(ep=True, cp=True, router_replay=True, lora=True, fp8=True),
    "kimi_k2": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, fp8=True, lora=True),
    "kimi_k25": Capabilities(ep=True, cp=True, router_replay=True, fp8=True),
    "laguna": Capabilities(ep=True, cp=True, router_replay=True, fp8_checkpoint=True, fp8=True, lora=True),
    "llama": Capabilities(cp=True, fp8_checkpoint=True, fp8=True, lora=True),
    "minimax_m2": Capabilities(ep=True, cp=True, router_replay=True, fp8_checkpoint=True, fp8=True, lora=True),
    "nemotron_h": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, lora=True, fp8=True),
    "qwen3": Capabilities(cp=True, fp8_checkpoint=True, fp8=True, lora=True),
    "qwen3_5": Capabilities(cp=True, fp8_checkpoint=True, lora=True, fp8=True, images=True),
    "qwen3_5_moe": Capabilities(
        ep=True, cp=True, fp8_checkpoint=True, router_replay=True, lora=True, fp8=True, images=True
    ),
    "qwen3_5_moe_text": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, lora=True, fp8=True),
    "qwen3_5_text": Capabilities(cp=True, fp8_checkpoint=True, fp8=True, lora=True),
    "qwen3_moe": Capabilities(ep=True, cp=True, fp8_checkpoint=True, router_replay=True, fp8=True, lora=True),
    "qwen3_vl": Capabilities(cp=True, lora=True, fp8=True, images=True),
    "qwen3_vl_moe": Capabilities(ep=True, cp=True, router_replay=True, lora=True, fp8=True, images=True),
}
"""`model_type` of config.json to what works with our own implementation of it."""

GENERIC = Capabilities(head_chunks=False, offload=False)
"""The implementation in transformers: sharded by FSDP, and nothing else."""


def capabilities(family: str, impl: str) -> Capabilities | None:
    """What works with a model type under `model.impl`; None if there is no such implementation."""
    if impl == "hf" or (impl == "auto" and family not in FAMILIES):
        return GENERIC
    return FAMILIES.get(family)
