"""Family record of Kimi-K2: the architecture of DeepSeek-V3."""

from dataclasses import replace

from primeslurm.models.family import EXPERTS, LATENT, MOE, SWIGLU, Family, Parsers

FAMILY = Family(
    name="kimi_k2",
    model_types={"kimi_k2": replace(MOE, int4_checkpoint=True, compile=True)},
    parsers={r"kimi-?k2": Parsers("kimi_k2", "kimi_k2")},
    renderer="kimi-k2",
    renderers={r"thinking": "primeslurm.models.kimi_k2.renderer:KimiK2ThinkingRenderer"},
    lora_targets=LATENT | SWIGLU | EXPERTS,
)
