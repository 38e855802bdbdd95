"""Family record of gpt-oss."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, MOE, Family, Parsers, RendererTraits, Traits

HARMONY = RendererTraits(setup="primeslurm.models.gpt_oss.harmony:vocabulary_of", replaces_template=True)

FAMILY = Family(
    name="gpt_oss",
    model_types={
        "gpt_oss": replace(MOE, fp8_checkpoint=False, mxfp4_checkpoint=True, compile=True, compiled_with=frozenset())
    },
    traits=Traits(output_bias=True, expert_bias=True, expert_stacks=True, sinks=True),
    parsers={r"gpt-?oss": Parsers("openai", "openai_gptoss")},
    renderer="gpt-oss",
    renderer_traits={"gpt-oss": HARMONY},
    # Experts have biases, so they have no adapters.
    lora_targets=ATTENTION,
)
