"""Foundations that every other package may import: errors, files, paths, units and process helpers."""
