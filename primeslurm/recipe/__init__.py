"""What the user writes: the recipe and the site file."""

from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.site import Site

__all__ = ["Recipe", "Site"]
