"""Laguna."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, EXPERTS, SWIGLU, Capabilities, Family, RendererTraits, Traits

FAMILY = Family(
    name="laguna",
    model_types={
        "laguna": Capabilities(
            ep=True, cp=True, fp8=True, lora=True, router_replay=True, fp8_checkpoint=True, compile=True
        )
    },
    traits=Traits(qk_norm=True, attention_gate="head"),
    renderer="laguna-xs.2",
    renderers={r"laguna-?m\.1": "laguna-m.1", r"laguna-?xs-?2\.1": "laguna-xs-2.1", r"laguna-?s-?2\.1": "laguna-s-2.1"},
    renderer_traits={name: RendererTraits(line_after="</assistant>") for name in ("laguna-m.1", "laguna-xs.2")},
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
