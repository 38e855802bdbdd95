"""Family record of Kimi-K2.5 to K2.7: Kimi-K2 with a vision encoder, which is not trained."""

from dataclasses import replace

from primeslurm.models.family import MOE, Family, Parsers

FAMILY = Family(
    name="kimi_k25",
    model_types={"kimi_k25": replace(MOE, lora=False, fp8_checkpoint=False, int4_checkpoint=True, compile=True)},
    parsers={r"kimi-?k2\.[5-9]": Parsers("kimi_k2", "kimi_k2")},
    renderer="kimi-k2.5",
)
