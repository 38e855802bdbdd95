"""GLM-5 and GLM-5.1: latent attention that is sparse."""

from __future__ import annotations

from primeslurm.models.family import EXPERTS, LATENT, SWIGLU, Capabilities, Family, Parsers

FAMILY = Family(
    name="glm_moe_dsa",
    model_types={
        "glm_moe_dsa": Capabilities(
            ep=True, cp=True, fp8=True, lora=True, router_replay=True, fp8_checkpoint=True, compile=True
        )
    },
    parsers={r"glm-?5": Parsers("glm47", "glm45")},
    renderer="glm-5.1",
    renderers={r"glm-?5": "glm-5", r"glm-?5\.1": "glm-5.1", r"glm-?5\.3": "glm-5.3"},
    lora_targets=LATENT - {"kv_b_proj"} | SWIGLU | EXPERTS,
)
