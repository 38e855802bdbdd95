"""The sections of a recipe."""
