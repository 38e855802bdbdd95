"""Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, EXPERTS, SWIGLU, Capabilities, Family, Parsers, Traits

FAMILY = Family(
    name="qwen3",
    model_types={
        "qwen3": Capabilities(
            cp=True, fp8=True, lora=True, fp8_checkpoint=True, compile=True, compiled_with=frozenset({"fp8"})
        ),
        "qwen3_moe": Capabilities(
            ep=True,
            cp=True,
            fp8=True,
            lora=True,
            router_replay=True,
            fp8_checkpoint=True,
            compile=True,
            compiled_with=frozenset({"cp", "fp8", "lora", "router_replay"}),
        ),
    },
    traits=Traits(qk_norm=True),
    parsers={r"qwen3": Parsers("hermes", "qwen3"), r"qwen3-?coder": Parsers("qwen3_coder")},
    renderer="qwen3",
    renderers={r"coder": "prime-qwen3"},
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
