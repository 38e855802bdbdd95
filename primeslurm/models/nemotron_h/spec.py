"""Nemotron-H and Nemotron 3: Mamba-2, attention and experts in layers of their own."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, Capabilities, Family, Parsers

FAMILY = Family(
    name="nemotron_h",
    model_types={
        "nemotron_h": Capabilities(
            ep=True, cp=True, fp8=True, lora=True, router_replay=True, fp8_checkpoint=True, compile=True
        )
    },
    parsers={r"nemotron-?3": Parsers("qwen3_coder", "nemotron_v3")},
    renderer="nemotron-3",
    renderers={r"nemotron-?3-?ultra": "nemotron-3-ultra", r"nemotron-?3\.5": "nemotron-3.5"},
    lora_targets=ATTENTION | {"up_proj", "down_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj"},
)
