"""What is known of each family of models, without torch: shape, capabilities, parsers, renderer, LoRA targets.

A module for each family; one that the trainer has code for has a module of the same name in
`primeslurm.models.model_builder`. Packages add theirs by entry points (docs/how-to/families.md).
"""

from __future__ import annotations

from primeslurm.models.family import (
    ATTENTION,
    EXPERTS,
    GENERIC,
    LATENT,
    SWIGLU,
    Capabilities,
    Family,
    Parsers,
    RendererTraits,
    Traits,
    VisionDefaults,
)
from primeslurm.models.registry import bundled, capabilities, families, family_of, lora_targets, model_types, parsers_of

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "GENERIC",
    "LATENT",
    "SWIGLU",
    "Capabilities",
    "Family",
    "Parsers",
    "RendererTraits",
    "Traits",
    "VisionDefaults",
    "bundled",
    "capabilities",
    "families",
    "family_of",
    "lora_targets",
    "model_types",
    "parsers_of",
]
