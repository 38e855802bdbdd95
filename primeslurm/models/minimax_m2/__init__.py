"""Minimax m2."""
