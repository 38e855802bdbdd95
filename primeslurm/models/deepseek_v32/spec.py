"""Family record of DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from dataclasses import replace

from primeslurm.models.family import EXPERTS, LATENT, MOE, SWIGLU, Family, Parsers

FAMILY = Family(
    name="deepseek_v32",
    model_types={"deepseek_v32": replace(MOE, draft_layer=True, compile=True)},
    parsers={r"deepseek-?v3\.2": Parsers("deepseek_v32", "deepseek_v3")},
    # Sparse attention reads the weight of kv_b_proj without calling it, so an adapter would have no effect.
    lora_targets=LATENT - {"kv_b_proj"} | SWIGLU | EXPERTS,
)
