"""MiniMax-M2."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, EXPERTS, Capabilities, Family, Parsers

FAMILY = Family(
    name="minimax_m2",
    model_types={
        "minimax_m2": Capabilities(
            ep=True,
            cp=True,
            fp8=True,
            lora=True,
            router_replay=True,
            fp8_checkpoint=True,
            compile=True,
            compiled_with=frozenset(),
        )
    },
    parsers={r"minimax-?m2": Parsers("minimax_m2", "minimax_m2")},
    renderer="minimax-m2",
    lora_targets=ATTENTION | EXPERTS,
)
