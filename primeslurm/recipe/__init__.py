"""The input of a run: the recipe and the site file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.recipe.recipe import Recipe
    from primeslurm.recipe.site import Site

__all__ = ["Recipe", "Site"]


def __getattr__(name: str) -> object:
    # Node agents import sections only. Importing both models at once would cost them memory.
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
