"""Layers that the model families are built of."""
