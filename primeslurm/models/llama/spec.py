"""Family record of Llama 2 and 3, and models with their architecture."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, DENSE, SWIGLU, Family

FAMILY = Family(
    name="llama",
    model_types={
        "llama": replace(
            DENSE, prefix_sharing=True, compile=True, compiled_with=frozenset({"fp8"}), engine_lora=ATTENTION | SWIGLU
        )
    },
    renderer="llama-3",
    lora_targets=ATTENTION | SWIGLU,
)
