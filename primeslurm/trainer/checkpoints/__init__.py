"""Checkpoints, and models made of them."""
