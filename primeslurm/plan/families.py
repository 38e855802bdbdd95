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
    """Adapters on linear layers and experts."""
    router_replay: bool = False
    head_chunks: bool = True
    """Logits in chunks of tokens."""


FAMILIES: dict[str, Capabilities] = {
    "llama": Capabilities(cp=True, fp8=True, lora=True),
    "qwen3": Capabilities(cp=True, fp8=True, lora=True),
    "qwen3_moe": Capabilities(ep=True, cp=True, fp8=True, lora=True),
    "glm4_moe": Capabilities(ep=True, cp=True, fp8=True, lora=True),
    "minimax_m2": Capabilities(ep=True, cp=True, fp8=True, lora=True),
    "afmoe": Capabilities(ep=True, cp=True, fp8=True, lora=True),
    "laguna": Capabilities(ep=True, cp=True, fp8=True, lora=True),
}
"""`model_type` of config.json to what works with our own implementation of it."""

GENERIC = Capabilities(head_chunks=False)
"""The implementation in transformers: sharded by FSDP, and nothing else."""


def capabilities(family: str, impl: str) -> Capabilities | None:
    """What works with a model type under `model.impl`; None if there is no such implementation."""
    if impl == "hf" or (impl == "auto" and family not in FAMILIES):
        return GENERIC
    return FAMILIES.get(family)
