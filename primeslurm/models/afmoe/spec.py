"""AFMoE (Arcee Trinity)."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, EXPERTS, SWIGLU, Capabilities, Family, Traits

FAMILY = Family(
    name="afmoe",
    model_types={
        "afmoe": Capabilities(
            ep=True, cp=True, fp8=True, lora=True, router_replay=True, fp8_checkpoint=True, compile=True
        )
    },
    traits=Traits(qk_norm=True, attention_gate="element", post_norms=True),
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
