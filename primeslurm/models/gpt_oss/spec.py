"""gpt-oss."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, Capabilities, Family, Parsers, RendererTraits, Traits

FAMILY = Family(
    name="gpt_oss",
    model_types={
        "gpt_oss": Capabilities(
            ep=True,
            cp=True,
            fp8=True,
            lora=True,
            router_replay=True,
            mxfp4_checkpoint=True,
            compile=True,
            compiled_with=frozenset(),
        )
    },
    traits=Traits(output_bias=True, expert_bias=True, expert_stacks=True, sinks=True),
    parsers={r"gpt-?oss": Parsers("openai", "openai_gptoss")},
    renderer="gpt-oss",
    renderer_traits={"gpt-oss": RendererTraits(harmony=True)},
    lora_targets=ATTENTION,
)
