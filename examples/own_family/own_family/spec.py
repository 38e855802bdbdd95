"""Description of Maple for primeslurm. Login nodes import it too, so it imports no torch."""

from primeslurm.models import ATTENTION, DENSE, SWIGLU, Family, Parsers, Traits

MAPLE = Family(
    name="maple",
    model_types={"maple": DENSE},
    traits=Traits(qk_norm=True),
    parsers={r"maple": Parsers("hermes", "qwen3")},
    lora_targets=ATTENTION | SWIGLU,
)
