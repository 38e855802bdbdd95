"""Family record of DeepSeek-V3 and R1."""

from dataclasses import replace

from primeslurm.models.family import EXPERTS, LATENT, MOE, SWIGLU, Family, Parsers, RendererTraits

V31_RENDERER = "primeslurm.models.deepseek_v3.renderer:DeepSeekV31Renderer"

FAMILY = Family(
    name="deepseek_v3",
    model_types={
        "deepseek_v3": replace(
            MOE, draft_layer=True, compile=True, compiled_with=frozenset({"fp8", "lora", "router_replay"})
        )
    },
    parsers={
        r"deepseek-?v3": Parsers("deepseek_v3"),
        r"deepseek-?v3\.1": Parsers("deepseek_v31", "deepseek_v3"),
        r"deepseek-?r1": Parsers("deepseek_v3", "deepseek_r1"),
    },
    renderer="deepseek-v3",
    renderers={r"deepseek-?r1": "deepseek-r1", r"deepseek-?v3\.1": V31_RENDERER},
    renderer_traits={V31_RENDERER: RendererTraits(describes_tools=True)},
    lora_targets=LATENT | SWIGLU | EXPERTS | {"q_proj"},
)
