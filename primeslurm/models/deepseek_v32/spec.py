"""DeepSeek-V3.2: DeepSeek-V3 with latent attention that is sparse."""

from __future__ import annotations

from primeslurm.models.family import EXPERTS, LATENT, SWIGLU, Capabilities, Family, Parsers

FAMILY = Family(
    name="deepseek_v32",
    model_types={
        "deepseek_v32": Capabilities(
            ep=True, cp=True, fp8=True, lora=True, router_replay=True, fp8_checkpoint=True, compile=True
        )
    },
    parsers={r"deepseek-?v3\.2": Parsers("deepseek_v32", "deepseek_v3")},
    lora_targets=LATENT - {"kv_b_proj"} | SWIGLU | EXPERTS,
)
