"""Laguna."""
