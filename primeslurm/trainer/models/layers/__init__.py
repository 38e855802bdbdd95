"""Layers that families are built of."""
