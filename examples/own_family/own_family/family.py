"""What `primeslurm` is told of Maple. It is read on login nodes, too: no torch here."""

from primeslurm.models import ATTENTION, SWIGLU, Capabilities, Family, Parsers, Traits

MAPLE = Family(
    name="maple",
    model_types={"maple": Capabilities(cp=True, fp8=True, lora=True, fp8_checkpoint=True)},
    builder="own_family.trainer",
    traits=Traits(qk_norm=True),
    parsers={r"maple": Parsers("hermes", "qwen3")},
    lora_targets=ATTENTION | SWIGLU,
)
