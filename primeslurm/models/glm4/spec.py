"""Family record of GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, DENSE, Family, Traits

FAMILY = Family(
    name="glm4",
    model_types={"glm4": replace(DENSE, prefix_sharing=True)},
    traits=Traits(post_norms=True),
    lora_targets=ATTENTION | {"gate_up_proj", "down_proj"},
)
