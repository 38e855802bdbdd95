"""What the user writes: the recipe and the site file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.recipe.recipe import Recipe
    from primeslurm.recipe.site import Site

__all__ = ["Recipe", "Site"]


def __getattr__(name: str) -> object:
    """Import either when it is asked for: agents know sections of a plan, and keep neither in their memory."""
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
