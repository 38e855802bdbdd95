"""Llama 2 and 3, and the models that share their architecture."""

from __future__ import annotations

from primeslurm.models.family import ATTENTION, SWIGLU, Capabilities, Family

FAMILY = Family(
    name="llama",
    model_types={
        "llama": Capabilities(
            cp=True, fp8=True, lora=True, fp8_checkpoint=True, compile=True, compiled_with=frozenset({"fp8"})
        )
    },
    renderer="llama-3",
    lora_targets=ATTENTION | SWIGLU,
)
