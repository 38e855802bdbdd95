"""The sections of a recipe, one module each."""
