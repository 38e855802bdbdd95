"""Model families that the trainer builds, and what each can be combined with. Known without importing torch."""

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


FAMILIES: dict[str, Capabilities] = {
    "qwen3": Capabilities(cp=True, fp8=True, lora=True),
    "qwen3_moe": Capabilities(ep=True, cp=True, fp8=True, lora=True),
}
"""`model_type` of config.json to what works with it."""
