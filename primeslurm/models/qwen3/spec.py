"""Family record of Qwen3 and Qwen3-MoE."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, DENSE, EXPERTS, MOE, SWIGLU, Family, Parsers, Traits

FAMILY = Family(
    name="qwen3",
    model_types={
        "qwen3": replace(
            DENSE, prefix_sharing=True, compile=True, compiled_with=frozenset({"fp8"}), engine_lora=ATTENTION | SWIGLU
        ),
        "qwen3_moe": replace(
            MOE, prefix_sharing=True, compile=True, compiled_with=frozenset({"cp", "fp8", "lora", "router_replay"})
        ),
    },
    traits=Traits(qk_norm=True),
    parsers={r"qwen3": Parsers("hermes", "qwen3"), r"qwen3-?coder": Parsers("qwen3_coder")},
    renderer="qwen3",
    renderers={r"coder": "prime-qwen3"},
    lora_targets=ATTENTION | SWIGLU | EXPERTS,
)
