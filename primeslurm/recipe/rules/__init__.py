"""Rules that compare fields of a recipe with one another."""
