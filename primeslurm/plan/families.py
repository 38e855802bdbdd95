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
    router_replay: bool = False


FAMILIES: dict[str, Capabilities] = {
    "gpt_oss": Capabilities(ep=True, cp=True),
    "nemotron_h": Capabilities(ep=True),
    "qwen3": Capabilities(cp=True),
    "qwen3_5": Capabilities(),
    "qwen3_5_moe": Capabilities(ep=True),
    "qwen3_5_moe_text": Capabilities(ep=True),
    "qwen3_5_text": Capabilities(),
    "qwen3_moe": Capabilities(ep=True, cp=True),
}
"""`model_type` of config.json to what works with it."""
