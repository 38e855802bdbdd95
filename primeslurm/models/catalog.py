"""Models whose shape is known where their files are not at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape

CATALOG = Path(__file__).with_name("catalog.json")


@dataclass(frozen=True)
class CatalogEntry:
    """A known model: where its shape is from, what is assumed, and the published sizes in billions of parameters."""

    shape: ModelShape
    source: str
    assumed: tuple[str, ...]
    parameters_b: float
    active_b: float


@cache
def catalog() -> dict[str, CatalogEntry]:
    """Known models by Hugging Face id."""
    stored = json.loads(CATALOG.read_bytes())
    entries = {name: stored[entry.get("same_shape_as", name)] for name, entry in stored.items()}
    return {
        name: CatalogEntry(
            shape=shape_of(entry["config"]),
            source=entry["source"],
            assumed=tuple(entry["assumed"]),
            parameters_b=entry["parameters_b"],
            active_b=entry["active_b"],
        )
        for name, entry in entries.items()
    }
