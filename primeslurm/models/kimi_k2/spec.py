"""Kimi-K2: DeepSeek-V3 by another name."""

from __future__ import annotations

from primeslurm.models.family import EXPERTS, LATENT, SWIGLU, Capabilities, Family, Parsers

FAMILY = Family(
    name="kimi_k2",
    model_types={
        "kimi_k2": Capabilities(
            ep=True,
            cp=True,
            fp8=True,
            lora=True,
            router_replay=True,
            fp8_checkpoint=True,
            int4_checkpoint=True,
            compile=True,
        )
    },
    parsers={r"kimi-?k2": Parsers("kimi_k2", "kimi_k2")},
    renderer="kimi-k2",
    renderers={r"thinking": "primeslurm.models.kimi_k2.renderer:KimiK2ThinkingRenderer"},
    lora_targets=LATENT | SWIGLU | EXPERTS,
)
