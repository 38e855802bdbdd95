"""Recipes before submission: loading, emulation, evaluation, comparison."""
