"""Qwen3.5 and its successors, dense and with experts, with an encoder of images or without."""

from __future__ import annotations

from dataclasses import replace

from primeslurm.models.family import ATTENTION, EXPERTS, SWIGLU, Capabilities, Family, Parsers, Traits, VisionDefaults
from primeslurm.models.qwen3_vl.spec import QWEN_ENCODER

DENSE = Capabilities(cp=True, fp8=True, lora=True, fp8_checkpoint=True)
MOE = replace(DENSE, ep=True, router_replay=True)

FAMILY = Family(
    name="qwen3_5",
    model_types={
        "qwen3_5": replace(DENSE, images=True),
        "qwen3_5_moe": replace(MOE, images=True),
        "qwen3_5_moe_text": MOE,
        "qwen3_5_text": DENSE,
    },
    traits=Traits(qk_norm=True, attention_gate="element", vision=VisionDefaults(QWEN_ENCODER, deepstack=())),
    parsers={r"qwen3\.[5-9]": Parsers("qwen3_coder", "qwen3")},
    renderer="qwen3.5",
    renderers={r"qwen3\.6": "qwen3.6", r"qwen3\.8": "qwen3.8"},
    lora_targets=ATTENTION | SWIGLU | EXPERTS | {"out_proj"},
)
