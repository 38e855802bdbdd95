"""Family record of GLM-5 and GLM-5.1: latent attention that is sparse."""

from dataclasses import replace

from primeslurm.models.family import EXPERTS, LATENT, MOE, SWIGLU, Family, Parsers

FAMILY = Family(
    name="glm_moe_dsa",
    model_types={"glm_moe_dsa": replace(MOE, draft_layer=True, compile=True)},
    parsers={r"glm-?5": Parsers("glm47", "glm45")},
    renderer="glm-5.1",
    renderers={r"glm-?5": "glm-5", r"glm-?5\.1": "glm-5.1", r"glm-?5\.3": "glm-5.3"},
    # Sparse attention reads the weight of kv_b_proj without calling it, so an adapter would have no effect.
    lora_targets=LATENT - {"kv_b_proj"} | SWIGLU | EXPERTS,
)
