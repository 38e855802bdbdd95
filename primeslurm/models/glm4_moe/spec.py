"""Family record of GLM-4.5 to GLM-4.7, and INTELLECT-3."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, EXPERTS, MOE, SWIGLU, Family, Parsers, RendererTraits

FAMILY = Family(
    name="glm4_moe",
    model_types={
        "glm4_moe": replace(
            MOE,
            prefix_sharing=True,
            draft_layer=True,
            compile=True,
            compiled_with=frozenset({"cp", "fp8", "lora", "router_replay"}),
        )
    },
    parsers={
        r"glm-?4\.[56]": Parsers("glm45", "glm45"),
        r"glm-?4\.7": Parsers("glm47", "glm45"),
        r"intellect-?3": Parsers("qwen3_coder", "deepseek_r1"),
    },
    renderer="glm-4.5",
    renderers={r"glm-?4\.7": "glm-5", r"intellect-?3": "primeslurm.models.glm4_moe.renderer:Intellect3Renderer"},
    renderer_traits={"glm-4.5": RendererTraits(newline_between_calls=("</tool_call>", "<tool_call>"))},
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
