"""Family record of MiniMax-M2."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, EXPERTS, MOE, Family, Parsers

FAMILY = Family(
    name="minimax_m2",
    model_types={"minimax_m2": replace(MOE, prefix_sharing=True, compile=True, compiled_with=frozenset())},
    parsers={r"minimax-?m2": Parsers("minimax_m2", "minimax_m2")},
    renderer="minimax-m2",
    lora_targets=ATTENTION | EXPERTS,
)
