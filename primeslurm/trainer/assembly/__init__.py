"""From a recipe to a sharded model with its weights."""
