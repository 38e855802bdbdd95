"""Shapes of well-known models, for plans that are made without the model's files."""

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
    """A well-known model: its shape, the source of the shape, and its published size."""

    shape: ModelShape
    source: str
    """Origin of the config."""
    assumed: tuple[str, ...]
    """Values of the config that are not published."""
    parameters_b: float
    """Published number of parameters [billions]."""
    active_b: float
    """Published number of parameters that a token uses [billions]."""


@cache
def catalog() -> dict[str, CatalogEntry]:
    """Return the known models by their Hugging Face id."""
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
