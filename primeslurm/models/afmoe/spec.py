"""Family record of AFMoE (Arcee Trinity)."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, EXPERTS, MOE, SWIGLU, Family, Traits

FAMILY = Family(
    name="afmoe",
    model_types={"afmoe": replace(MOE, prefix_sharing=True, compile=True)},
    traits=Traits(qk_norm=True, attention_gate="element", post_norms=True),
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
