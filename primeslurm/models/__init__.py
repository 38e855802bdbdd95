"""Model families, one folder each. Files are shared by all families.

`<family>/spec.py` describes a family without torch: capabilities, shape traits, parsers, renderers, LoRA targets.
`model.py` builds its torchtitan model. Where a family needs them, `weights.py` maps the names of its checkpoints, and
`renderer.py` renders its messages. Other modules of a folder hold layers that only this family has. Other packages add
families by entry points (docs/how-to/families.md).
"""

from __future__ import annotations

import primeslurm.nn  # noqa: F401  patches torchtitan before a family's `model` imports it
from primeslurm.models.family import (
    ATTENTION,
    DENSE,
    EXPERTS,
    GENERIC,
    LATENT,
    MOE,
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
    "DENSE",
    "EXPERTS",
    "GENERIC",
    "LATENT",
    "MOE",
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
