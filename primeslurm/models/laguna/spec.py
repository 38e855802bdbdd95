"""Family record of Laguna."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, EXPERTS, MOE, SWIGLU, Family, RendererTraits, Traits

FAMILY = Family(
    name="laguna",
    model_types={"laguna": replace(MOE, prefix_sharing=True, compile=True)},
    traits=Traits(qk_norm=True, attention_gate="head"),
    renderer="laguna-xs.2",
    renderers={r"laguna-?m\.1": "laguna-m.1", r"laguna-?xs-?2\.1": "laguna-xs-2.1", r"laguna-?s-?2\.1": "laguna-s-2.1"},
    renderer_traits={name: RendererTraits(newline_after_turn="</assistant>") for name in ("laguna-m.1", "laguna-xs.2")},
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
