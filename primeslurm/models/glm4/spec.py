"""GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, Capabilities, Family, Traits

FAMILY = Family(
    name="glm4",
    model_types={"glm4": Capabilities(cp=True, fp8=True, lora=True, fp8_checkpoint=True)},
    traits=Traits(post_norms=True),
    lora_targets=ATTENTION | {"gate_up_proj", "down_proj"},
)
