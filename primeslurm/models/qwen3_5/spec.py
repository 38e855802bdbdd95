"""Family record of Qwen3.5 and later: dense or with experts, with a vision encoder or without."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, DENSE, EXPERTS, MOE, SWIGLU, Family, Parsers, Traits, VisionDefaults
from primeslurm.models.qwen3_vl.spec import QWEN_ENCODER

FAMILY = Family(
    name="qwen3_5",
    model_types={
        "qwen3_5": replace(DENSE, draft_layer=True, images=True),
        "qwen3_5_moe": replace(MOE, draft_layer=True, images=True),
        "qwen3_5_moe_text": replace(MOE, draft_layer=True),
        "qwen3_5_text": replace(DENSE, draft_layer=True),
    },
    traits=Traits(qk_norm=True, attention_gate="element", vision=VisionDefaults(QWEN_ENCODER, deepstack=())),
    parsers={r"qwen3\.[5-9]": Parsers("qwen3_coder", "qwen3")},
    renderer="qwen3.5",
    renderers={r"qwen3\.6": "qwen3.6", r"qwen3\.8": "qwen3.8"},
    lora_targets=ATTENTION | SWIGLU | EXPERTS | {"out_proj"},
)
